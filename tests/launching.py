"""Launches for the tests of the command line: in this process or in one that can be killed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "train.py"

spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

# Two seeds of a tiny i-DQN: 3 chunks of 250 steps of the algorithm (the first is shorter by its prefill).
TINY = """--algo iqn --env CartPole-v1 --steps 3000 --eval-period 1000 --num-envs 4 --seeds 0 1 --eval-episodes 2
    --config.hidden 16 --config.capacity 2000 --config.prefill 400 --config.batch-size 16 --config.train-period 4
    --config.num-iterates 2 --config.n-step 2 --config.window-period 200 --config.sync-period 40""".split()


def main(*arguments) -> int:
    return script.main([str(a) for a in arguments])


def start(*arguments, code: str = "") -> subprocess.Popen:
    """`scripts/train.py` in a process of its own; `code` is run in it first."""
    program = f"{code}\nimport runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-u", "-c", program, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


def metrics(run_dir: Path) -> list[dict]:
    """metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "steps_per_second")} for line in lines]


def state_digest(run_dir: Path) -> int:
    """The checksum of the whole final state, replay and keys included, that its checkpoint recorded."""
    (folder,) = (run_dir / "checkpoint").iterdir()
    return json.loads((folder / "meta" / "metadata").read_text())["digest"]
