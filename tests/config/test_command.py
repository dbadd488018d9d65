"""The command itself, in another process and another folder, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ("model=tiny", "workload=fixed", "workload.batch_size=1", "workload.prompt_len=32",
         "workload.gen_len=3")  # fmt: skip


def sim(
    folder: Path, *overrides: str, start: tuple[str, str] = ("-m", "sim"), **env: str
) -> subprocess.CompletedProcess[str]:
    """``python -m sim`` in ``folder``."""
    return subprocess.run(
        (sys.executable, *start, *overrides),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "100",
             "PYTHONIOENCODING": "utf-8", "HOME": str(folder), **env},
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


def test_a_sweep_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "out").write_text("")
    done = sim(tmp_path, "-m", *SMALL, "hydra.sweep.dir=out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: out: must be a folder, a file is in the way\n"


def test_a_run_folder_that_is_a_file_is_one_line_unless_the_trace_is_wanted(tmp_path):
    (tmp_path / "out").write_text("")
    done = sim(tmp_path, *SMALL, "hydra.run.dir=out")
    assert done.stderr == "error: out: must be a folder, a file is in the way\n"
    assert done.returncode == 2
    done = sim(tmp_path, *SMALL, "hydra.run.dir=out", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_only_a_sweep_is_resumed(tmp_path):
    done = sim(tmp_path, *SMALL, "sweep.resume=out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: sweep.resume: needs a sweep, add -m\n"


def test_the_export_folder_is_made_before_the_run(tmp_path):
    (tmp_path / "requests").write_text("")
    done = sim(tmp_path, *SMALL, "export.dir=requests", "hydra.run.dir=out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: export.dir: requests is a file, must be a folder\n"
    assert not (tmp_path / "out/result.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine", b"gemm: {x: [1\nb: 2", 'conf/hardware/mine.yaml", line 2, column 2'),
        ("mine", b"name: \xff", "conf/hardware/mine.yaml, byte 6: is not UTF-8"),
        ("rtx3090", None, "conf/hardware/rtx3090.yaml: is a folder, must be a YAML file"),
    ],
)
def test_a_broken_profile_of_the_working_folder_is_one_line(tmp_path, name, content, message):
    path = tmp_path / f"conf/hardware/{name}.yaml"
    path.parent.mkdir(parents=True)
    path.mkdir() if content is None else path.write_bytes(content)
    done = sim(tmp_path, *SMALL, f"hardware={name}")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        ("KeyboardInterrupt", 130, "error: interrupted\n"),
        ("OSError(28, 'No space left', 'out/x')", 2, "error: out/x: No space left\n"),
    ],
)
def test_what_ends_a_run_from_outside_is_one_line(tmp_path, raised, code, message):
    program = (
        "import sys, sim.__main__ as entry\n"
        f"def simulate(*_, **__): raise {raised}\n"
        "entry.simulate = simulate\n"
        "sys.exit(entry.main())\n"
    )
    done = sim(tmp_path, *SMALL, "hydra.run.dir=out", start=("-c", program))
    assert (done.returncode, done.stderr) == (code, message)


def test_an_ascii_terminal_gets_what_it_can_show(tmp_path):
    done = sim(tmp_path, *SMALL, LC_ALL="C", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?s" in done.stdout  # microseconds
    assert "policy.placement=auto keeps the weights" in " ".join(done.stdout.split())
