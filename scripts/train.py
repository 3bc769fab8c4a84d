"""Trains an algorithm: `python scripts/train.py --algo iqn`. `--help` shows every flag."""

import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runner import cli
from runner.check import BadInput


def use_compilation_cache():
    """Keeps compiled programs in the user's cache folder, apart for each kind of processor."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        cpu = Path("/proc/cpuinfo")
        lines = cpu.read_text().splitlines() if cpu.exists() else []
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        jax.config.update(
            "jax_compilation_cache_dir", str(cache / "bellmax" / hashlib.sha1(flags.encode()).hexdigest()[:8])
        )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def show_list():
    """Algorithms, environments and datasets with their action types."""
    import envs
    from envs import mdps
    from replay import builtin
    from runner import settings

    for name in settings.algorithms():
        algo = settings.load(name)
        flag = f"--{settings.kind_of(algo).flag}"
        print(f"{name:<24} {' or '.join(algo.ACTIONS):<24} {flag:<10} {algo.__doc__.strip().splitlines()[0]}")
    print()
    for name in envs.ids():
        print(f"{name:<28} {envs.action_type(name)}")
    print()
    for name, dataset in builtin.TABLE.items():
        print(f"{name:<28} {envs.action_type(dataset.env):<12} {dataset.env}: {dataset.about}")
    print()
    for name, build in mdps.BUILDERS.items():
        print(f"--mdp {name:<22} {build.__doc__.splitlines()[0]}")


def main(argv: list[str]) -> int:
    """Exit code: 0 done or stopped, 2 bad input, 3 every run diverged, 130 interrupted twice."""
    try:
        if "--list" in argv:
            show_list()
            return 0
        launch = cli.parse(argv)
        use_compilation_cache()
        from runner.train import train

        return train(launch)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what the last checkpoint holds is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
