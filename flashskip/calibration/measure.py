"""The gaps of a causal language model from Hugging Face, on texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flashskip._options import check_choice, refusal
from flashskip.calibration.curve import Measurement
from flashskip.geometry import Geometry
from flashskip.integrations._phases import Phase
from flashskip.policy import PHASES

# Not "flash...": transformers takes such names for builds of FlashAttention.
NAME = "skip_softmax_measure"


def measure(
    model: Any,
    texts: Iterable[tuple[str, Tensor]],
    *,
    phases: Sequence[str] = PHASES,
    decode_steps: int = 32,
) -> Iterator[Measurement]:
    """Run texts through a model, with dense attention, and yield the gaps of every layer.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model. Its attention is exchanged while texts run.
    texts : iterable of (str, torch.Tensor)
        A name, and int64 ``[1, length + decode_steps]``: the last tokens are decoded one by one,
        as given. Without decode, the whole text is the prompt.
    phases : sequence of {"prefill", "decode"}
        What to measure.
    decode_steps : int
        Tokens to decode.

    Yields
    ------
    Measurement
        For each text and phase, with gaps ``[layers, heads, 256]``. The length of decode is the
        mean over its steps.

    Raises
    ------
    ValueError
        A text is too short, or a phase unknown.
    """
    for phase in phases:
        check_choice("phases", phase, PHASES)
    steps = decode_steps if "decode" in phases else 0
    for name, tokens in texts:
        length = tokens.shape[1] - steps
        if length < 1:
            raise refusal(
                f"{name} has {tokens.shape[1]} tokens",
                f"over {steps}",
                "Take more",
            )
        recorder = _Recorder(phases)
        with torch.no_grad(), _attention(model, recorder):
            _run(model, tokens.to(model.device), length)
        for phase in phases:
            yield Measurement(
                phase=phase,
                text=name,
                kv_len=length if phase == "prefill" else length + (steps + 1) // 2,
                gaps=recorder.gaps(phase),
                geometry=recorder.geometries[phase],
            )


def _run(model: Any, tokens: Tensor, length: int) -> None:
    """Prefill `length` tokens and decode the rest."""
    from transformers import DynamicCache

    from flashskip.integrations.transformers import cache_argument

    cache = DynamicCache(config=model.config)
    past = {cache_argument(model): cache}
    pieces = [tokens[:, :length], *(tokens[:, i : i + 1] for i in range(length, tokens.shape[1]))]
    for piece in pieces:
        model(piece, use_cache=True, logits_to_keep=1, **past)


@contextmanager
def _attention(model: Any, recorder: _Recorder) -> Iterator[None]:
    """Put the recorder in the place of the model's attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from flashskip.integrations._masks import attention_mask

    AttentionInterface.register(NAME, recorder)
    AttentionMaskInterface.register(NAME, attention_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _Recorder:
    """Dense attention, on any device, that keeps the gaps of each layer and phase."""

    def __init__(self, phases: Sequence[str]) -> None:
        self.geometries: dict[str, Geometry] = {}
        self._measured = phases
        self._wrappers: dict[tuple[nn.Module, str], Phase] = {}
        self._gaps: dict[str, dict[nn.Module, Tensor]] = {phase: {} for phase in phases}

    def gaps(self, phase: str) -> Tensor:
        """Histograms ``[layers, heads, 256]``, layers in order of first use."""
        if not self._gaps[phase]:
            raise refusal(
                f"no attention layer ran in {phase}",
                "a model whose attention goes through transformers' AttentionInterface",
                "Use another model",
            )
        return torch.stack(list(self._gaps[phase].values()))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # plans on the host
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers asks, and record."""
        from flashskip.integrations import transformers

        transformers.refuse_unsupported(
            dropout=dropout, output_attentions=output_attentions, **kwargs
        )
        mask = transformers.resolve_mask(
            attention_mask, module, query, key, sliding_window, is_causal
        )
        name = "decode" if mask.qo_len == 1 else "prefill"
        options = transformers.layer_options(query, key, scaling, softcap, s_aux)
        if name in self._measured:
            options["skip_criterion"] = "measure"
        phase = self._wrappers.get((module, name))
        if phase is None:
            phase = self._wrappers[module, name] = transformers.PHASES[name](query.device)
        out = phase.attend(query, key, value, mask, options)
        if name in self._measured:
            self._record(name, module, phase)
        return out, None

    def _record(self, name: str, module: nn.Module, phase: Phase) -> None:
        """Add the last run's gaps, without waiting for the GPU."""
        self.geometries.setdefault(name, phase.wrapper.geometry)
        gaps = phase.wrapper.gaps.sum(0)
        of_layer = self._gaps[name]
        of_layer[module] = of_layer[module] + gaps if module in of_layer else gaps
        phase.wrapper.reset_stats()
