"""Writes the one PDF of the example collection, the same bytes on every run.

The dates inside the file are fixed and its streams are not compressed, so that the bytes depend on
the text below and on the version of fpdf2 alone.

    python tools/build_handbook_pdf.py
"""

from datetime import UTC, datetime
from pathlib import Path

from fpdf import FPDF

OUTPUT_PATH = Path(__file__).parents[1] / "examples/handbook/docs/calibration-laboratory.pdf"

TITLE = "Calibration laboratory"
PAGES = (
    (
        ("Calibration laboratory", "heading"),
        (
            "The calibration laboratory of Pellamor is in Bristol, building C. "
            "It checks every instrument before it is sold.",
            "text",
        ),
        (
            "A calibration certificate is valid for 18 months. "
            "Calibration certificates are signed by Edda Novak, the head of the laboratory.",
            "text",
        ),
        (
            "The temperature in the calibration laboratory is kept at 20.5 degrees Celsius. "
            "Work stops when it moves by more than half a degree.",
            "text",
        ),
    ),
    (
        ("Prices and reference standards", "heading"),
        (
            "A calibration of the Otter 2 costs 85 GBP. A calibration of the Silt One costs "
            "120 GBP. A calibration of the Heron buoy costs 640 GBP.",
            "text",
        ),
        (
            "The reference standards are compared once a year with those of the institute in "
            "Trondheim. The next comparison is on 9 June 2026.",
            "text",
        ),
    ),
)


def build_handbook_pdf() -> bytes:
    """Returns the PDF file: A4, one page per entry of `PAGES`, Latin-1 text only."""
    pdf = FPDF(format="A4")
    pdf.set_compression(False)
    pdf.set_creation_date(datetime(2025, 10, 1, 9, 0, tzinfo=UTC))
    pdf.set_title(TITLE)
    pdf.set_author("Pellamor Instruments")
    pdf.set_margin(25)
    for page in PAGES:
        pdf.add_page()
        for text, kind in page:
            is_heading = kind == "heading"
            pdf.set_font(
                "Helvetica", style="B" if is_heading else "", size=18 if is_heading else 11
            )
            pdf.multi_cell(0, 6, text, align="L", new_x="LMARGIN", new_y="NEXT")
            pdf.ln(4)
    return bytes(pdf.output())


if __name__ == "__main__":
    OUTPUT_PATH.write_bytes(build_handbook_pdf())
    print(f"{OUTPUT_PATH.stat().st_size} bytes in {OUTPUT_PATH}")
