"""How generation stands still while the policy's weights change: what trainers ask for, and what engines are told."""

from typing import Literal

PauseMode = Literal["freeze", "hold", "drain", "sleep"]
"""What happens to running calls when generation is paused. freeze: they stop where they are; hold: they go on, and new
calls wait; drain: as hold, and the pause begins when the last one has ended; sleep: as drain, and the engines then free
their memory."""

PauseState = Literal[PauseMode, "settle"]
"""The pause that a run's engines are in. settle: frozen calls learn the new version before any engine goes on."""
