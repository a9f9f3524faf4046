"""The gaps of a causal language model from Hugging Face, on texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flashskip._checks import check_count
from flashskip._options import check_choice, refusal
from flashskip.calibration.curve import Measurement
from flashskip.decode import BatchDecodeWrapper
from flashskip.geometry import Geometry
from flashskip.integrations._phases import new_workspace
from flashskip.policy import PHASES
from flashskip.prefill import BatchPrefillWrapper

# Not "flash...": transformers takes such names for builds of FlashAttention.
NAME = "skip_softmax_measure"


def measure(
    model: Any,
    texts: Iterable[tuple[str, Tensor]],
    *,
    phases: Sequence[str] = PHASES,
    decode_steps: int = 64,
) -> Iterator[Measurement]:
    """Run texts through a model, with dense attention, and yield the gaps of every layer.

    One pass per text serves both phases. Its tokens are known and attention stays dense, so the row
    of a position is what a decode step there would compute.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model. Its attention is exchanged while texts run.
    texts : iterable of (str, torch.Tensor)
        A name, and int64 ``[1, length]``.
    phases : sequence of {"prefill", "decode"}
        What to measure.
    decode_steps : int
        Positions taken as decode steps, at equal distances in the last eighth of the text: the
        steps of one place are much alike.

    Yields
    ------
    Measurement
        For each text and phase, with gaps ``[layers, heads, 256]``. The length of decode is the
        mean over its steps.

    Raises
    ------
    ValueError
        A text is too short, a phase unknown, or no attention layer was seen.
    """
    for phase in phases:
        check_choice("phases", phase, PHASES)
    check_count("decode_steps", decode_steps)
    for name, tokens in texts:
        positions = _decode_positions(name, tokens, decode_steps)
        recorder = _Recorder(phases, positions.to(model.device))
        with torch.no_grad(), exchanged_attention(model, recorder):
            model(tokens.to(model.device), use_cache=False, logits_to_keep=1)
        lengths = {"prefill": tokens.shape[1], "decode": round(float((positions + 1.0).mean()))}
        for phase in phases:
            yield Measurement(
                phase=phase,
                text=name,
                kv_len=lengths[phase],
                gaps=recorder.gaps(phase),
                geometry=recorder.geometries[phase],
            )


def _decode_positions(name: str, tokens: Tensor, steps: int) -> Tensor:
    """Choose at most `steps` positions in the last eighth of a text, the last one among them."""
    if tokens.dim() != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 1:
        raise refusal(
            f"{name} is {tuple(tokens.shape)}",
            "tokens (1, length)",
            "Pass one text at a time",
        )
    length = tokens.shape[1]
    stride = max(1, -(-length // 8) // steps)
    first = max(0, length - steps * stride)
    return torch.arange(length - 1, first - 1, -stride).flip(0)


def decode_table(positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Describe rows of a text as decode steps: a request each, and one page that they all share.

    Parameters
    ----------
    positions : Tensor
        Integer ``[steps]``: the request of position p sees the keys 0 to p.

    Returns
    -------
    indptr, indices, last_page_len : Tensor
        As `BatchDecodeWrapper.plan` takes them; the page is as long as the text.
    """
    indptr = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
    return indptr, torch.zeros_like(indptr[1:]), (positions + 1).to(torch.int32)


@contextmanager
def exchanged_attention(model: Any, function: Any) -> Iterator[None]:
    """Put a function in the place of the attention of a model from transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from flashskip.integrations._masks import attention_mask

    AttentionInterface.register(NAME, function)
    AttentionMaskInterface.register(NAME, attention_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class _Recorder:
    """Dense attention, on any device, that keeps the gaps of each layer and phase."""

    def __init__(self, phases: Sequence[str], positions: Tensor) -> None:
        self.geometries: dict[str, Geometry] = {}
        self._measured = phases
        self._positions = positions
        self._table = decode_table(positions)
        self._gaps: dict[str, list[Tensor]] = {phase: [] for phase in phases}

    def gaps(self, phase: str) -> Tensor:
        """Histograms ``[layers, heads, 256]``, layers in the order in which they ran."""
        if not self._gaps[phase]:
            raise refusal(
                f"no attention layer ran in {phase}",
                "a model whose attention goes through transformers' AttentionInterface",
                "Use another model",
            )
        return torch.stack(self._gaps[phase])

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
        options = transformers.layer_options(query, key, scaling, softcap, s_aux)
        prefill = transformers.PHASES["prefill"](query.device, new_workspace(query.device))
        criterion = {"skip_criterion": "measure"} if "prefill" in self._measured else {}
        out = prefill.attend(query, key, value, mask, {**options, **criterion})
        if "prefill" in self._measured:
            self._record("prefill", prefill.wrapper)
        if "decode" in self._measured:
            options["window_left"] = mask.effective_window()
            self._record("decode", self._decode(query, key, value, options))
        return out, None

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> BatchDecodeWrapper:
        """Run the chosen rows as decode steps, for their gaps alone."""
        wrapper = BatchDecodeWrapper(new_workspace(query.device), kv_layout="HND")
        heads, kv_heads, length, head_dim = query.shape[1], *key.shape[1:]
        wrapper.plan(
            *self._table, heads, kv_heads, head_dim, length, skip_criterion="measure", **options
        )
        rows = query[0, :, self._positions].transpose(0, 1).contiguous()
        wrapper.run(rows, (key, value))
        return wrapper

    def _record(self, phase: str, wrapper: BatchPrefillWrapper | BatchDecodeWrapper) -> None:
        """Keep the gaps of a layer, without waiting for the GPU."""
        self.geometries.setdefault(phase, wrapper.geometry)
        self._gaps[phase].append(wrapper.gaps.sum(0))
