"""Sampling parameters, verification mode and random keys of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from specrag.v1 import common_pb2

from specrag_common.runtime.errors import FieldViolation, InvalidRequest
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.randomness import RANDOM_KEY_BYTES

MAX_TEMPERATURE: Final = 2.0
MAX_ANSWER_TOKENS: Final = 4096
MAX_STOP_STRINGS: Final = 8
MAX_STOP_CHARS: Final = 64

_MODES: Final = {
    VerificationMode.REJECTION: common_pb2.VERIFICATION_MODE_REJECTION,
    VerificationMode.COUPLED: common_pb2.VERIFICATION_MODE_COUPLED,
}
_MODES_DECODED: Final[dict[int, VerificationMode]] = {
    message: mode for mode, message in _MODES.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The output law and the ends of an answer, as asked for; defaults are the contract's.

    Attributes:
        temperature: 0 (greedy) to 2.
        top_p: over 0 to 1; 1 keeps everything.
        top_k: tokens kept; 0 keeps everything.
        max_tokens: most answer tokens, 1 to 4096.
        stop: up to 8 strings of 1 to 64 code points.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


def encode_sampling(options: SamplingOptions) -> common_pb2.SamplingParams:
    """Return the message of ``options``, every field set."""
    return common_pb2.SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens,
        stop=options.stop,
    )


def decode_sampling(message: common_pb2.SamplingParams, field: str = "sampling") -> SamplingOptions:
    """Return the options of ``message``, absent fields at their defaults.

    Raises:
        InvalidRequest: fields out of range; all of them are named at once.
    """
    default = SamplingOptions()
    options = SamplingOptions(
        temperature=_given(message, "temperature", default.temperature),
        top_p=_given(message, "top_p", default.top_p),
        top_k=int(_given(message, "top_k", default.top_k)),
        max_tokens=int(_given(message, "max_tokens", default.max_tokens)),
        stop=tuple(message.stop),
    )
    violations = _number_violations(options, field) + _stop_violations(options.stop, field)
    if violations:
        raise InvalidRequest.of(violations)
    return options


def encode_mode(mode: VerificationMode) -> common_pb2.VerificationMode.ValueType:
    """Return the enum value of ``mode``."""
    return _MODES[mode]


def decode_mode(value: int, field: str = "mode") -> VerificationMode:
    """Return the mode; between services it is always stated.

    Raises:
        InvalidRequest: the value is unspecified or unknown.
    """
    try:
        return _MODES_DECODED[value]
    except KeyError:
        raise InvalidRequest(field, f"unspecified or unknown value {value}") from None


def check_random_key(random_key: bytes, field: str = "random_key") -> bytes:
    """Return the key; raise ``InvalidRequest`` unless it has exactly 16 bytes."""
    if len(random_key) != RANDOM_KEY_BYTES:
        raise InvalidRequest(field, f"{len(random_key)} bytes, need {RANDOM_KEY_BYTES}")
    return random_key


def _given(message: common_pb2.SamplingParams, name: str, default: float) -> float:
    return getattr(message, name) if message.HasField(name) else default  # type: ignore[arg-type]


def _number_violations(options: SamplingOptions, field: str) -> list[FieldViolation]:
    temperature, top_p = options.temperature, options.top_p
    checks = (
        (
            "temperature",
            math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE,
            f"{temperature:g} is outside 0 to {MAX_TEMPERATURE:g}",
        ),
        ("top_p", math.isfinite(top_p) and 0 < top_p <= 1, f"{top_p:g} is not over 0 to 1"),
        ("top_k", options.top_k >= 0, f"{options.top_k} is negative; 0 keeps every token"),
        (
            "max_tokens",
            1 <= options.max_tokens <= MAX_ANSWER_TOKENS,
            f"{options.max_tokens} is outside 1 to {MAX_ANSWER_TOKENS}",
        ),
    )
    return [
        FieldViolation(f"{field}.{name}", text) for name, is_good, text in checks if not is_good
    ]


def _stop_violations(stop: tuple[str, ...], field: str) -> list[FieldViolation]:
    if len(stop) > MAX_STOP_STRINGS:
        return [FieldViolation(f"{field}.stop", f"{len(stop)} strings exceed {MAX_STOP_STRINGS}")]
    return [
        FieldViolation(
            f"{field}.stop[{idx}]", f"length {len(text)} is outside 1 to {MAX_STOP_CHARS}"
        )
        for idx, text in enumerate(stop)
        if not 1 <= len(text) <= MAX_STOP_CHARS
    ]
