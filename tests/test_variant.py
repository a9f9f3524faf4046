"""Variants: every field matters, symbols are unique, the matrix covers what it promises."""

import dataclasses
import itertools

import pytest

from flashskip import _kernels
from flashskip._tiles import tile_for
from flashskip.variant import DOMAINS, Variant, alternatives, every, fault, matrix, supported


def test_symbols_are_unique_and_lead_back():
    symbols = {v.symbol for v in every()}
    assert len(symbols) == len(every())
    for v in matrix():
        assert Variant.from_symbol(v.symbol) == v
        assert v.symbol.isidentifier()


def test_an_unknown_symbol_is_refused_by_name():
    with pytest.raises(ValueError, match="variant 'flashskip_nonsense' is unknown"):
        Variant.from_symbol("flashskip_nonsense")


def test_domains_name_every_field():
    fields = {f.name for f in dataclasses.fields(Variant)} - {"op"}
    for domain in DOMAINS.values():
        assert set(domain) == fields


def test_the_matrix_holds_every_pair_of_values_that_any_variant_has():
    def pairs(variants):
        found = set()
        for v in variants:
            items = dataclasses.asdict(v).items()
            found |= {(v.op, a, b) for a, b in itertools.combinations(items, 2)}
        return found

    assert pairs(matrix()) == pairs(every())
    assert len(matrix()) <= 400
    assert all(supported(v) for v in matrix())


def _neighbours(name):
    """Pairs of supported variants of one operation that differ in one field only."""
    by_rest = {}
    for v in every():
        rest = (v.op, tuple((k, x) for k, x in dataclasses.asdict(v).items() if k != name))
        by_rest.setdefault(rest, []).append(v)
    return [group[:2] for group in by_rest.values() if len(group) > 1]


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, n) for op, domain in DOMAINS.items() for n, values in domain.items() if len(values) > 1],
)
def test_every_field_changes_the_rendered_source(op, name):
    """A field that changes nothing but the symbol is a dead option."""
    pairs = [p for p in _neighbours(name) if p[0].op == op]
    if not pairs:  # fields that only move together, as kv_dtype with q_dtype
        assert name in (
            "q_dtype",
            "kv_dtype",
            "head_dim_qk",
            "head_dim_vo",
            "skip",
            "order",
            "vote_kv",
        )
        return
    a, b = pairs[0]
    text_a = _kernels.program_for(a).source.text.replace(a.symbol, "")
    text_b = _kernels.program_for(b).source.text.replace(b.symbol, "")
    assert text_a != text_b


def test_a_fault_names_the_field_and_its_alternatives():
    v = dataclasses.replace(matrix()[0], head_dim_qk=80, head_dim_vo=80)
    assert fault(v) == "head_dim_qk"
    assert alternatives(v, "head_dim_qk") == list(DOMAINS[v.op]["head_dim_qk"])
    v = dataclasses.replace(matrix()[0], bound=True)
    assert fault(v) == "bound"


def test_rings_of_decode_have_stages_for_all_loaders():
    """Two warps own every second stage, and in a row at a ring's end there may be two of one."""
    for v in every():
        if v.op == "decode":
            tile = tile_for(v)
            assert min(tile.k_stages, tile.v_stages) >= 2, v.symbol
            assert tile.v_stages >= 2 + tile.v_stages % 2, v.symbol
