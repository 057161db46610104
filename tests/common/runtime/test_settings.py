from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from typing import ClassVar

import pydantic
import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from specrag_common.runtime.settings import (
    LogLevel,
    ServiceSettings,
    SettingsError,
    load_settings,
    read_settings,
)


class ShopSettings(ServiceSettings):
    """A service of a test."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(env_prefix="SPECRAG_SHOP_")

    num_shelves: int = Field(default=3, ge=1)
    """Shelves."""

    name: str
    """No default."""


@pytest.fixture(autouse=True)
def named_shop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAG_SHOP_NAME", "corner")


def test_values_come_from_the_environment_with_the_services_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECRAG_SHOP_NUM_SHELVES", "7")
    monkeypatch.setenv("SPECRAG_SHOP_LOG_LEVEL", "warning")

    settings = read_settings(ShopSettings)

    assert (settings.num_shelves, settings.log_level) == (7, LogLevel.WARNING)


def test_settings_are_frozen() -> None:
    settings = read_settings(ShopSettings)

    with pytest.raises(pydantic.ValidationError):
        settings.port = 1  # type: ignore[misc] # the point of the test


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("SPECRAG_SHOP_NUM_SHELFS", "SPECRAG_SHOP_NUM_SHELVES"),
        ("SPECRAG_SHOP_PROT", "SPECRAG_SHOP_PORT"),
        ("SPECRAG_SHPO_NUM_SHELVES", "SPECRAG_SHOP_NUM_SHELVES"),
        ("SPECRAG_SHOP_DRAIN_GRACE_MS", "SPECRAG_SHOP_DRAIN_GRACE_S"),
    ],
)
def test_misspelt_variable_fails_with_the_nearest_right_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, hint: str
) -> None:
    monkeypatch.setenv(variable, "5")

    with pytest.raises(SettingsError, match=f"unknown setting {variable}; did you mean {hint}"):
        read_settings(ShopSettings)


def test_variables_of_other_services_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("RETRIEVER", "DRAFTER", "VERIFIER", "ORCHESTRATOR"):
        monkeypatch.setenv(f"SPECRAG_{service}_NUM_SHELVES", "5")

    assert read_settings(ShopSettings).num_shelves == 3


def test_bad_values_are_named_with_the_variable_and_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECRAG_SHOP_NUM_SHELVES", "0")
    monkeypatch.setenv("SPECRAG_SHOP_PORT", "http")

    with pytest.raises(SettingsError) as caught:
        read_settings(ShopSettings)

    line = str(caught.value)
    assert "SPECRAG_SHOP_NUM_SHELVES='0'" in line
    assert "greater than or equal to 1" in line
    assert "SPECRAG_SHOP_PORT='http'" in line
    assert "\n" not in line


def test_missing_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECRAG_SHOP_NAME")

    with pytest.raises(SettingsError, match="SPECRAG_SHOP_NAME is not set"):
        read_settings(ShopSettings)


def test_load_settings_prints_one_line_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECRAG_SHOP_PORT", "99999")

    with pytest.raises(SystemExit) as caught:
        load_settings(ShopSettings)

    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: SPECRAG_SHOP_PORT='99999': ")
    assert printed.count("\n") == 1


def test_process_with_a_bad_setting_shows_no_traceback() -> None:
    program = (
        "from specrag_common.runtime.settings import ServiceSettings, load_settings\n"
        "load_settings(ServiceSettings)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"SPECRAG_PORT": "-1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "SPECRAG_PORT='-1'" in done.stderr


def test_every_field_is_documented() -> None:
    tree = ast.parse(inspect.getsource(ServiceSettings))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    undocumented = [
        node.target.id
        for node, after in zip(body.body, [*body.body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id != "model_config"
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]

    assert undocumented == []
