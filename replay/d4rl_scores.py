"""D4RL's normalised scores: 0 is a random policy's return in a task, 100 an expert's.

    score = 100 (return - low) / (high - low)

Source: D4RL (https://github.com/Farama-Foundation/D4RL), d4rl/infos.py, for the tasks that results are published on.
"""

import re

from runner.check import BadInput

LEVELS = "(random|medium|expert|medium-replay|full-replay|medium-expert)"

# Names of tasks -> returns of a random policy and of an expert. All versions of a task share them.
REFERENCES = {
    f"halfcheetah-{LEVELS}-v[012]": (-280.178953, 12135.0),
    f"hopper-{LEVELS}-v[012]": (-20.272305, 3234.3),
    f"walker2d-{LEVELS}-v[012]": (1.629008, 4592.3),
    f"ant-{LEVELS}-v[012]": (-325.6, 3879.7),
    "antmaze-(umaze|(umaze|medium|large)-diverse|(medium|large)-play)-v[012]": (0.0, 1.0),
    "kitchen-(complete|partial|mixed)-v0": (0.0, 4.0),
    "pen-(human|cloned|expert)-v[01]": (96.262799, 3076.8331017826877),
    "hammer-(human|cloned|expert)-v[01]": (-274.856578, 12794.134825156867),
    "door-(human|cloned|expert)-v[01]": (-56.512833, 2880.5693087298737),
    "relocate-(human|cloned|expert)-v[01]": (-6.425911, 4233.877797728884),
    "maze2d-umaze-v1": (23.85, 161.86),
    "maze2d-medium-v1": (13.13, 277.39),
    "maze2d-large-v1": (6.7, 273.99),
}


def references(env_name: str) -> tuple[float, float]:
    """Returns of a random policy and of an expert in a D4RL task such as `hopper-medium-v2`."""
    for pattern, returns in REFERENCES.items():
        if re.fullmatch(pattern, env_name):
            return returns
    families = ", ".join(dict.fromkeys(pattern.partition("-")[0] for pattern in REFERENCES))
    raise BadInput(f"no reference returns are known for {env_name!r}; there are D4RL's for tasks of {families}")


def normalized_score(env_name: str, episode_return):
    """Score of one return, or of an array of them: 0 at the random policy's, 100 at the expert's."""
    low, high = references(env_name)
    return 100 * (episode_return - low) / (high - low)
