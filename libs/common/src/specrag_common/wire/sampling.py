"""Sampling parameters, verification mode and random keys of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from specrag.v1 import common_pb2

from specrag_common.runtime.errors import FieldViolation, InvalidRequest
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.randomness import RANDOM_KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TEMPERATURE: Final = 2.0
MAX_TOP_K: Final = 2**31 - 1
MIN_REPETITION_PENALTY: Final = 0.1
MAX_REPETITION_PENALTY: Final = 10.0
MAX_PENALTY: Final = 2.0
MAX_LOGIT_BIAS: Final = 100.0
MAX_BIASED_TOKENS: Final = 1024
MAX_ANSWER_TOKENS: Final = 4096
MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 8
MAX_STOP_CHARS: Final = 64


class _Range(NamedTuple):
    """From the least to the most value, both included unless ``is_open`` below."""

    least: float
    most: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is inside; a NaN never is."""
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def describe(self) -> str:
        bounds = f"{_show(self.least)} to {_show(self.most)}"
        return f"not over {bounds}" if self.is_open else f"outside {bounds}"


_RANGES: Final = {
    "temperature": _Range(0, MAX_TEMPERATURE),
    "top_p": _Range(0, 1, is_open=True),
    "top_k": _Range(0, MAX_TOP_K),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": _Range(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _Range(-MAX_PENALTY, MAX_PENALTY),
    "max_tokens": _Range(1, MAX_ANSWER_TOKENS),
    "num_top_logprobs": _Range(0, MAX_TOP_LOGPROBS),
}
_BIAS: Final = _Range(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)

_OPTIONAL_FIELDS: Final = (*_RANGES, "min_tokens")

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
        min_p: 0 (off) to 1 of the most likely token's probability.
        repetition_penalty: 0.1 to 10; 1 is neutral; looks at prompt and answer.
        presence_penalty: -2 to 2; looks at the answer.
        frequency_penalty: -2 to 2; looks at the answer.
        logit_bias: (token id, -100 to 100) by rising id, at most 1,024.
        max_tokens: most answer tokens, 1 to 4096.
        min_tokens: answer tokens before it may end by itself, 0 to ``max_tokens``.
        stop: up to 8 strings of 1 to 64 code points.
        num_top_logprobs: 0 to 20 likely tokens reported beside each one of the answer; ``None``
            reports no log-probabilities at all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    num_top_logprobs: int | None = None


def encode_sampling(options: SamplingOptions) -> common_pb2.SamplingParams:
    """Return the message of ``options``, every field set."""
    return common_pb2.SamplingParams(
        stop=options.stop,
        logit_bias=dict(options.logit_bias),
        **{name: getattr(options, name) for name in _OPTIONAL_FIELDS},
    )


def decode_sampling(
    message: common_pb2.SamplingParams, field: str = "sampling", *, vocab_size: int | None = None
) -> SamplingOptions:
    """Return the options of ``message``, absent fields at their defaults.

    Args:
        message: as received.
        field: its path in the request, for errors.
        vocab_size: ids of ``logit_bias`` are below it; ``None`` where it is not known yet.

    Raises:
        InvalidRequest: fields out of range; all of them are named at once.
    """
    options = SamplingOptions(
        stop=tuple(message.stop),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        **{
            name: getattr(message, name)
            for name in _OPTIONAL_FIELDS
            if message.HasField(name)  # type: ignore[arg-type]
        },
    )
    violations = [
        *_number_violations(options, field),
        *_bias_violations(options, field),
        *([] if vocab_size is None else _unknown_biased(options, vocab_size, field)),
        *_stop_violations(options.stop, field),
    ]
    if violations:
        raise InvalidRequest.of(violations)
    return options


def check_biased_tokens(options: SamplingOptions, vocab_size: int, field: str = "sampling") -> None:
    """Raise ``InvalidRequest`` when ``logit_bias`` names ids that the vocabulary lacks."""
    violations = list(_unknown_biased(options, vocab_size, field))
    if violations:
        raise InvalidRequest.of(violations)


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


def _number_violations(options: SamplingOptions, field: str) -> Iterator[FieldViolation]:
    for name, range_ in _RANGES.items():
        value = getattr(options, name)
        if value is not None and not range_.holds(value):
            yield FieldViolation(f"{field}.{name}", f"{_show(value)} is {range_.describe()}")
    if not 0 <= options.min_tokens <= max(0, options.max_tokens):
        yield FieldViolation(
            f"{field}.min_tokens",
            f"{options.min_tokens} is outside 0 to max_tokens={options.max_tokens}",
        )


def _bias_violations(options: SamplingOptions, field: str) -> Iterator[FieldViolation]:
    if len(options.logit_bias) > MAX_BIASED_TOKENS:
        yield FieldViolation(
            f"{field}.logit_bias", f"{len(options.logit_bias)} ids exceed {MAX_BIASED_TOKENS}"
        )
        return
    for token_id, bias in options.logit_bias:
        name = f"{field}.logit_bias[{token_id}]"
        if not _BIAS.holds(bias):
            yield FieldViolation(name, f"{_show(bias)} is {_BIAS.describe()}")
        if token_id < 0:
            yield FieldViolation(name, "the token id is negative")


def _show(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unknown_biased(
    options: SamplingOptions, vocab_size: int, field: str
) -> Iterator[FieldViolation]:
    for token_id, _ in options.logit_bias[:MAX_BIASED_TOKENS]:
        if token_id >= vocab_size:
            yield FieldViolation(
                f"{field}.logit_bias[{token_id}]",
                f"the token id is outside 0 to {vocab_size - 1}, the target's vocabulary",
            )


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
