"""The proofs themselves: a claim that does not hold must turn the table red."""

import subprocess
import sys

import prove
import pytest


def test_a_failing_test_is_a_failing_claim(tmp_path):
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert 1 == 2\n")
    (result,) = prove.tests(str(tmp_path))()
    assert not result.holds
    assert "1 failed" in result.value


def test_a_benchmark_that_cannot_run_is_a_failing_claim():
    (result,) = prove.bench("overhead", "--no-such-option")()
    assert not result.holds


def test_only_the_claims_asked_for_are_run(monkeypatch, capsys):
    ran = []
    claims = [
        prove.Claim(text, lambda text=text: iter([prove.Result(ran.append(text) or "", "1", "2", True)]))
        for text in "ab"
    ]
    monkeypatch.setattr(prove, "CLAIMS", claims)
    monkeypatch.setattr(sys, "argv", ["prove.py", "--only", "b"])
    with pytest.raises(SystemExit, match=r"^0$"):
        prove.main()
    assert ran == ["b"]


@pytest.mark.soak
def test_quick_claims_hold():
    done = subprocess.run([sys.executable, prove.__file__, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
