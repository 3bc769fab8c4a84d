"""Quasimetric heads: the authors' numbers, unions of intervals by hand, the laws of a quasimetric, equal forms."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from networks import quasimetric

GOLDEN = Path(__file__).parent / "golden"
golden = lambda name: json.loads((GOLDEN / f"{name}.json").read_text())
array = partial(np.asarray, dtype=np.float32)
close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # float32

IQE = golden("qrl_iqe")
OGBENCH = golden("qrl_ogbench_heads")
each_form = pytest.mark.parametrize("form", quasimetric.FORMS)


def components(form, x, y, size):
    return quasimetric.iqe_components(array(x), array(y), len(x[0]) // size, form)


@cache
def distance(form, num_components):
    """d and its gradients in x, y and raw, jitted: shapes are `(B, C k)`."""

    def total(x, y, raw):
        d = quasimetric.maxmean(quasimetric.iqe_components(x, y, num_components, form), raw)
        return d.sum(), d

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))


# --- the authors' code ---


@each_form
@pytest.mark.parametrize("case", IQE["cases"], ids=lambda case: case["name"])
def test_unions_are_the_authors(form, case):
    x, y, size = case["x"], case["y"], case["dim_per_component"]
    close(components(form, x, y, size), case["components_xy"])
    close(components(form, y, x, size), case["components_yx"])
    close(quasimetric.maxmean(components(form, x, y, size), -1.0), case["d_xy_init"])


@each_form
def test_distances_and_all_gradients_are_the_authors(form):
    given = IQE["random"]
    x, y, z = (array(given[name]) for name in "xyz")
    grad = distance(form, 2)
    (_, d), (x_grad, y_grad, raw_grad) = grad(x, y, -1.0)
    close(components(form, x, y, 4), given["components_xy"])
    close(d, given["d_xy"])
    close(x_grad, given["grad_x"])
    close(y_grad, given["grad_y"])
    close(raw_grad, given["grad_raw_alpha"])
    for name, pair in dict(d_yx=(y, x), d_xz=(x, z), d_zy=(z, y)).items():
        close(grad(*pair, -1.0)[0][1], given[name])
    close(grad(x, y, 0.7)[0][1], given["d_xy_raw_alpha_0.7"])


def test_ogbenchs_head_is_the_authors_with_the_sign_of_its_parameter_turned():
    x, y = array(OGBENCH["x"]), array(OGBENCH["y"])
    ogbench, authors = quasimetric.IQE(2, "ogbench"), quasimetric.IQE(2)
    params = ogbench.init(jax.random.key(0), x, y)
    assert params == {"params": {"alpha": 0}}
    close(ogbench.apply(params, x, y), OGBENCH["iqe_alpha_param_0"])
    one = ogbench.apply({"params": {"alpha": 1.0}}, x, y)
    close(one, OGBENCH["iqe_alpha_param_1"])
    assert authors.init(jax.random.key(0), x, y) == {"params": {"raw": -1}}
    close(authors.apply({"params": {"raw": -1.0}}, x, y), one)


# --- by hand ---


@each_form
def test_gradient_is_minus_one_at_left_ends_of_the_union_and_one_at_right_ends(form):
    # [0, 2] and [1, 3] overlap: one piece, 0 to 3. [5, 6] is another. [7, 4] is empty. Length 3 + 1.
    x, y = jnp.array([0.0, 1.0, 5.0, 7.0]), jnp.array([2.0, 3.0, 6.0, 4.0])
    length, (x_grad, y_grad) = jax.value_and_grad(quasimetric.FORMS[form], (0, 1))(x, y)
    assert length == 4 and x_grad.tolist() == [-1, 0, -1, 0] and y_grad.tolist() == [0, 1, 1, 0]


def test_max_and_mean_are_weighted_by_the_sigmoid():
    # sigmoid(ln 3) = 3/4: 1/4 of the mean 2 and 3/4 of the maximum 3
    close(quasimetric.maxmean(jnp.array([1.0, 3.0]), jnp.log(3.0)), 2.75)


def test_network_starts_as_it_should():
    network = quasimetric.Network((50, 30), zero_final=True)
    params = network.init(jax.random.key(0), jnp.ones(70))["params"]
    bound = (6 / (70 + 50)) ** 0.5  # Glorot and Bengio's, uniform
    first = np.abs(params["Dense_0"]["kernel"])
    assert first.max() < bound and first.max() > 0.99 * bound and abs(first.mean() / bound - 0.5) < 0.03
    assert not any(np.asarray(p).any() for p in (params["Dense_0"]["bias"], params["Dense_1"]["kernel"]))


def test_activations_are_relu_or_gelu_and_its_layer_norm():
    params = {"params": {f"Dense_{i}": {"kernel": jnp.eye(2), "bias": jnp.zeros(2)} for i in (0, 1)}}
    x = jnp.array([-1.0, 2.0])
    relu, gelu = (quasimetric.Network((2, 2), name).apply(params, x) for name in ("relu", "gelu"))
    close(relu, [0, 2])
    close(gelu, [-0.158808, 1.954598], atol=2e-6)  # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    params["params"]["LayerNorm_0"] = {"scale": jnp.array([1.0, 2.0]), "bias": jnp.array([0.0, 5.0])}
    close(quasimetric.Network((2, 2), "gelu_norm").apply(params, x), [-1, 7], atol=1e-5)  # normalised: -1 and 1


# --- laws ---

# Few different numbers, so that ends coincide; and any.
numbers = st.one_of(st.integers(-3, 3).map(float), st.floats(-100, 100, width=32))
triples = arrays(np.float32, (3, 12), elements=numbers)
law = settings(max_examples=150, deadline=None)


@law
@given(triples, st.sampled_from([-1.0, 0.0, 2.0]))
def test_distances_are_a_quasimetric(points, raw):
    d = lambda i, j: float(distance("pairwise", 3)(points[i][None], points[j][None], raw)[0][0])
    assert d(0, 0) == 0
    assert d(0, 1) >= 0
    assert d(0, 2) <= d(0, 1) + d(1, 2) + 1e-3  # sums of twelve float32 of up to 200


def test_a_distance_need_not_be_that_of_the_way_back():
    x, y = jnp.zeros((1, 4)), jnp.ones((1, 4))
    assert distance("pairwise", 2)(x, y, -1.0)[0][0] == 1 and distance("pairwise", 2)(y, x, -1.0)[0][0] == 0


@law
@given(triples)
def test_forms_agree(points):
    x, y = points[:2, None]
    (expected, _), grads = distance("sort", 3)(x, y, -1.0)
    for form in ("ordered", "pairwise"):
        (d, _), others = distance(form, 3)(x, y, -1.0)
        np.testing.assert_allclose(d, expected, rtol=1e-5, atol=1e-4)  # differences of numbers up to 100
        # Where ends coincide each form has its own subgradient; the length is 1-homogeneous in all of them.
        slope = (others[0] * x + others[1] * y).sum()
        np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=2e-3)
    assert np.isfinite(grads[0]).all()


@each_form
def test_components_act_on_the_last_axis_under_vmap(form):
    rng = np.random.default_rng(0)
    x, y = array(rng.normal(size=(2, 2, 5, 6)))
    whole = quasimetric.iqe_components(x, y, 2, form)
    assert whole.shape == (2, 5, 2)
    mapped = jax.vmap(jax.vmap(lambda x, y: quasimetric.iqe_components(x, y, 2, form)))(x, y)
    close(mapped, whole)
    # The union's length by brute force: the share of a fine grid that some interval covers.
    grid = np.linspace(-5, 5, 100_001)
    for c in (0, 1):
        inside = [(grid >= x[1, 3, 3 * c + j]) & (grid < y[1, 3, 3 * c + j]) for j in range(3)]
        np.testing.assert_allclose(whole[1, 3, c], np.any(inside, 0).mean() * 10, atol=4e-4)  # 3 pieces, 1e-4 each
