"""What bridges look at before a session is trained on."""

from collections.abc import Iterable

from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.records.experts import Experts
from polar.records.trajectory import Trace


def check_temperature(items: Iterable[SessionItem], temperature: float) -> None:
    """Recorded log-probabilities are of logits that were divided by something, which must be the trainer's temperature.
    Raises ConfigError."""
    for trace in (trace for item in items for trace in item.trajectory.traces):
        check_logit_scales(trace.session_id, get_logit_scales(trace), temperature)


def require_experts(trace: Trace) -> Experts:
    """The experts of its tokens, for a trainer that routes by them. Raises ConfigError where there are none."""
    if trace.experts is None:
        raise ConfigError(
            f"The trainer replays routing, and the engine did not tell which experts {trace.session_id}'s tokens were "
            "routed to: start it with --enable-return-routed-experts; for SGLang set [engine] options.routed_experts."
        )
    return trace.experts


def get_logit_scales(trace: Trace) -> list[float | None]:
    """What divided the logits, for each of its exchanges; None where nobody can say. None at all without recorded
    log-probabilities: the trainer's own are of its temperature."""
    return [] if trace.logprobs is None else [trace.scales.get(name) for name in trace.exchange_ids]


def check_logit_scales(session: str, found: Iterable[float | None], temperature: float) -> None:
    """As `check_temperature`, of one trace's `scales`."""
    told = list(dict.fromkeys(found))
    if any(one != temperature for one in told):
        known = ", ".join("one that can't be told (by top_p, say)" if one is None else f"{one:g}" for one in told)
        raise ConfigError(
            f"The trainer computes at temperature {temperature:g}, and the log-probabilities of {session} are of "
            f"temperature {known}: choose a temperature that engine and trainer share, such as 1, and nothing else "
            "that changes what is sampled."
        )
