from __future__ import annotations

import pytest
import receipt


def test_source_digest_covers_kernels_and_launches():
    names = {p.relative_to(receipt.ROOT).parts[0] for p in receipt.source_files()}
    assert names == {"templates", "csrc", "flashskip"}
    assert all((receipt.ROOT / name).exists() for name in receipt.SOURCES)


def test_source_digest_changes_with_any_file(tmp_path, monkeypatch):
    monkeypatch.setattr(receipt, "ROOT", tmp_path)
    monkeypatch.setattr(receipt, "SOURCES", ("csrc",))
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cuh").write_text("x")
    before = receipt.source_digest()
    assert receipt.source_digest() == before
    (tmp_path / "csrc" / "a.cuh").write_text("y")
    changed = receipt.source_digest()
    (tmp_path / "csrc" / "a.cuh").rename(tmp_path / "csrc" / "b.cuh")
    assert len({before, changed, receipt.source_digest()}) == 3


@pytest.mark.parametrize("marker", receipt.RECEIPTS)
def test_receipt_is_of_a_run_without_failures(marker):
    found = receipt.read(marker)
    if found is None:
        pytest.skip(f"no such run is recorded; run `pytest -m {marker}` on a Hopper GPU")
    assert found["counts"]["passed"] > 0
    assert found["counts"]["failed"] == found["counts"]["error"] == 0


@pytest.mark.parametrize("marker", receipt.RECEIPTS)
def test_stale_receipt_is_announced(marker, capsys):
    found = receipt.read(marker)
    if found is None or found["source_digest"] == receipt.source_digest():
        return
    with capsys.disabled():
        print(
            f"\n{receipt.RECEIPTS[marker].name} is stale: kernels changed after {found['date']}; "
            f"`pytest -m {marker}`"
        )


def test_the_documentation_has_the_figures_of_the_receipts():
    page = receipt.PAGE.read_text()
    assert receipt.written(page) == page, "run `python tests/receipt.py`"
    assert all(f"| `pytest -m {marker}` |" in page for marker in receipt.RECEIPTS)


def test_figures_of_each_kind_of_receipt(monkeypatch):
    about = {
        "source_digest": receipt.source_digest(),
        "counts": {"passed": 7, "failed": 0, "error": 0, "skipped": 2},
        "seconds": 61.4,
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"gpu": "NVIDIA H200", "gpus": 2, "driver": "580.1"},
        "versions": {"torch": "2.11.0", "nvidia-cuda-nvrtc": "13.0.88"},
    }
    more = {
        "gpu": {},
        "gpu_fuzz": {
            "examples": 520,
            "variants": 40,
            "rows": 1000,
            "rows_decided": 987,
            "source_digest": "another",
        },
        "gpu_sanitize": {"runs": {"a b": {"launches": 5, "findings": 0, "deliberate": 3}}},
    }
    monkeypatch.setattr(
        receipt, "read", lambda marker: {**about, **more[marker]} if marker in more else None
    )
    *_, gpu, fuzz, sanitize, missing = receipt.figures().splitlines()
    machine = "2 x NVIDIA H200, driver 580.1, torch 2.11.0, NVRTC 13.0.88; 61 s on 2026-01-02"
    assert gpu == f"| `pytest -m gpu` | 7 passed, 2 skipped | {machine} |"
    assert "520 random calls of 40 kernels, 1,000 rows, 98.7% of them decided" in fuzz
    assert fuzz.endswith(f"{machine}, of older sources |")
    assert "a b: 0 findings, 3 deliberate in 5 launches" in sanitize
    assert missing == "| `pytest -m two_gpus` | not run yet | |"
