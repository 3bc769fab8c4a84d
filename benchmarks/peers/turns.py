"""What the peers' scripts for `benchmarks/peer_speed.py` share: their flags, and one measurement per line read."""

import argparse
import json
import sys
import time

import jax


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True, help="steps of a turn")
    parser.add_argument("--seeds", type=int, default=1, help="how many are vmapped into one program")
    parser.add_argument(
        "--capacity", type=int, default=100_000, help="transitions of the replay or dataset; SAC and IQL only"
    )
    parser.add_argument("--source", help="folder of a checkout; purejaxrl only")
    return parser.parse_args()


def serve(lower, turn, steps, **facts):
    """Compiles, warms up, then measures once for every line of the standard input.

    Args: lower, from nothing to a lowered program; turn, from the compiled program to nothing, when
        `steps` steps are done; facts, whatever else the first line of JSON shall say.
    """
    start = time.perf_counter()
    program = lower().compile()
    compile_seconds = time.perf_counter() - start
    turn(program)
    print(json.dumps(dict(facts, compile_seconds=compile_seconds, jax=jax.__version__)), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        turn(program)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps(dict(seconds_per_step=wall / steps, cpu_seconds_per_step=cpu / steps)), flush=True)
