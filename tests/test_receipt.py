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
