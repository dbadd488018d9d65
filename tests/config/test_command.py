"""The command itself, in another process and another folder, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("model=tiny", "workload=fixed", "workload.batch_size=1", "workload.prompt_len=32",
         "workload.gen_len=3")  # fmt: skip


def sim(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``python -m sim`` in ``folder``."""
    return subprocess.run(
        (sys.executable, "-m", "sim", *overrides),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "100",
             "PYTHONIOENCODING": "utf-8", "HOME": str(folder)},
    )  # fmt: skip


def test_a_run_with_a_profile_of_the_working_folder(tmp_path):
    profile = (ROOT / "conf/hardware/t4.yaml").read_text().replace("name: t4", "name: my", 1)
    (tmp_path / "conf/hardware").mkdir(parents=True)
    (tmp_path / "conf/hardware/my.yaml").write_text(profile)
    done = sim(tmp_path, *SMALL, "hardware=my", "hydra.run.dir=out")
    assert (done.returncode, done.stderr) == (0, "")
    before, _, after = done.stdout.partition("tightllm: tiny on my, fixed")
    assert "Break-even" in before
    assert "memory peak" in after
    row = json.loads((tmp_path / "out/result.json").read_text())
    assert (row["status"], row["hardware"]) == ("ok", "my")
    assert row["provenance"]["overrides"] == [*SMALL, "hardware=my"]


def test_a_profile_must_not_hide_a_shipped_one(tmp_path):
    (tmp_path / "conf/hardware").mkdir(parents=True)
    (tmp_path / "conf/hardware/t4.yaml").write_text("name: t4\n")
    done = sim(tmp_path, *SMALL)
    assert done.returncode == 2
    assert done.stderr.endswith("t4.yaml: has the name of a shipped file, give it another\n")
    assert done.stderr.count("\n") == 1


def test_out_of_memory_is_a_result(tmp_path):
    overrides = ("model=opt-30b", "policy=accelerate", "hardware.gpu_bytes=2e9")
    done = sim(tmp_path, *SMALL, *overrides, "hydra.run.dir=out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "out of memory" in done.stdout
    assert "GPU memory: need" in done.stdout
    row = json.loads((tmp_path / "out/result.json").read_text())
    assert (row["status"], row["oom_tier"], row["makespan_s"]) == ("oom", "gpu", None)
    assert row["need_bytes"] > row["have_bytes"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("policy=fastllm",), "error: policy: 'fastllm' does not exist"),
        (("model=tiny", "workload.path=cut.csv"), "error: cut.csv, line 3: 1 fields"),
    ],
)
def test_a_wrong_command_is_one_line(tmp_path, overrides, message):
    (tmp_path / "cut.csv").write_text("prompt_tokens,response_tokens\n10,5\n12")
    done = sim(tmp_path, *overrides)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_sweep_survives_a_bad_cell(tmp_path):
    done = sim(tmp_path, "-m", *SMALL, "workload.prompt_len=-1,32", "~hydra.callbacks.aggregate",
               "hydra.sweep.dir=out")  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    first, second = done.stdout.splitlines()
    assert first.endswith("failed: workload.prompt_len: -1 must be >= 1")
    assert "tokens/s" in second
    rows = [json.loads((tmp_path / f"out/{i}/result.json").read_text()) for i in (0, 1)]
    assert [row["status"] for row in rows] == ["failed", "ok"]
    assert "ValueError" in (tmp_path / "out/0/error.txt").read_text()
