"""What a trained policy's returns are like, not only their mean: `python scripts/evaluate.py RUN`.

Plays many episodes and prints mean, CVaRs and quantiles, for every seed of the launch; draws their histogram.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from runner import cli
from runner.check import BadInput


@dataclass(frozen=True)
class Options:
    """Plays episodes with a policy that training wrote, and says what its returns are like.

    `--env-params.NAME VALUE` sets a parameter of the environment; without, it is as in training.
    """

    policy: tyro.conf.Positional[Path]
    """File that training wrote (policy/best.msgpack), or a run directory, whose best policy is taken."""
    episodes: int = 1_000
    """Episodes for each seed; for a CVaR at 0.05 take 10,000."""
    risk: Annotated[tuple[float, ...], tyro.conf.arg(metavar="TAU")] = (0.05, 0.1, 0.25, 0.5)
    """Levels of CVaR, fractions in (0, 1]: the mean of the worst and of the best."""
    runs: tuple[int, ...] | None = None
    """Which runs, counted from 0; None: all."""
    env: str | None = None
    """Environment id; None: that of training."""
    seed: int = 0
    """All randomness comes from it."""
    num_envs: int = 1_000
    """Episodes played at once."""
    out: Path | None = None
    """Folder of risk.json and risk.png; None: evaluation/ in the run directory, or beside the file."""


def main(argv: list[str]) -> int:
    try:
        tokens, env_params = cli.split_env_params(cli.normalise(argv))
        options = tyro.cli(Options, args=tokens, prog="evaluate.py")
        from runner import check, files, policy, risk

        path = policy.find(options.policy)
        folder = path.parent.parent if path.parent.name == "policy" else path.parent
        out = options.out or folder / "evaluation"
        risk.check(options.episodes, options.num_envs, options.risk, options.seed)
        check.check_writable(out)
        sizes = (options.episodes, options.num_envs)
        played, name = risk.play(path, options.runs, *sizes, options.seed, options.env, env_params)
        report = risk.report(played, options.risk)
        print(risk.table(report))
        files.write(out / "risk.json", json.dumps(report, indent=2, allow_nan=False).encode())
        risk.plot(played, out / "risk.png", f"{name}, {options.episodes:,} episodes")
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"written to {out}: risk.json, risk.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
