"""Switches in the environment mean what they say, or raise."""

from __future__ import annotations

import pytest

from cake_ops._environment import flag


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", False), (None, False)])
def test_a_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv("CAKE_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("CAKE_SWITCH", value)
    assert flag("CAKE_SWITCH") is on


@pytest.mark.parametrize("value", ["true", "yes", "2"])
def test_another_value_raises(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CAKE_SWITCH", value)
    with pytest.raises(RuntimeError, match=f"CAKE_SWITCH must be 1, 0 or not set, got '{value}'"):
        flag("CAKE_SWITCH")
