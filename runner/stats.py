"""Statistics over seeds: the interquartile mean and its bootstrap interval (Agarwal et al. 2021)."""

import numpy as np
from scipy import stats


def iqm(values, axis=0):
    """Interquartile mean: the mean of what is left after dropping floor(n / 4) values at each end."""
    return stats.trim_mean(np.asarray(values, float), 0.25, axis=axis)


def interval(values, statistic=iqm, confidence=0.95, resamples=2_000):
    """Percentile bootstrap interval over axis 0, the seeds; both ends equal the value where there is one seed.

    Args: values `(R, ...)`. Returns: low and high, `(...)`. The resampling is seeded: the same numbers
        give the same interval.
    """
    values = np.asarray(values, float)
    if len(values) == 1:
        return values[0], values[0]
    index = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    resampled = statistic(np.moveaxis(values[index], 1, 0))  # (resamples, ...)
    tail = (1 - confidence) / 2
    return tuple(np.quantile(resampled, [tail, 1 - tail], axis=0))
