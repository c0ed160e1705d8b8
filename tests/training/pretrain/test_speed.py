"""The speed of a real step."""

from collections.abc import Iterator
from types import SimpleNamespace

import jax
import pytest
from small_run import small_config, write_corpus

from bert_jax.cli.start.recipe import Size, recipe
from bert_jax.distributed.parallel.sharding import make_mesh
from bert_jax.training.pretrain import speed


def test_a_step_of_a_recipe_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    monkeypatch.setattr(speed, "_MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(speed, "_LEAST_STEPS", 1)
    assert speed.step_seconds(recipe(Size(2, 64)), write_corpus(tmp_path)) > 0


@pytest.mark.parametrize(
    ("least", "enough", "seconds"),
    [(3, 0.0, 2.0), (1, 7.5, 2.0), (1, 8.5, 3.0)],
)
def test_steps_are_timed_without_the_first_until_it_is_enough(
    tmp_path, monkeypatch, least, enough, seconds
):
    """The first compiles; the median of the others counts."""
    took = iter([100.0, 1.0, 5.0, 2.0, 4.0, 3.0])

    def clock() -> Iterator[float]:
        now = 0.0
        for each in took:
            yield now
            now += each
            yield now

    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=clock().__next__))
    monkeypatch.setattr(speed, "jitted_init", lambda *_: lambda key: None)
    monkeypatch.setattr(speed, "make_train_step", lambda *_: lambda state, batch: (state, {}))
    monkeypatch.setattr(speed, "place_batch", lambda batch, mesh: batch)
    monkeypatch.setattr(speed, "_MEASURED_SECONDS", enough)
    monkeypatch.setattr(speed, "_LEAST_STEPS", least)
    assert speed.step_seconds(recipe(Size(2, 64)), write_corpus(tmp_path)) == seconds


def test_each_phase_counts_by_its_steps(tmp_path, monkeypatch):
    """Only the first was timed: a recipe with dearer later phases trained for too long."""
    now, rates = 0.0, []

    def take(state, batch):
        nonlocal now
        now += batch["tokens"].shape[1] / 16
        return state, {}

    def make(settings, mesh):
        rates.append(settings.objective.masking.rate)
        return take

    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(speed, "jitted_init", lambda *_: lambda key: None)
    monkeypatch.setattr(speed, "make_train_step", make)
    monkeypatch.setattr(speed, "place_batch", lambda batch, mesh: batch)
    phases = [
        {"length": 32, "batch_size": 16, "share": 0.6, "masking_rate": 0.3},
        {"length": 64, "batch_size": 16, "share": 0.4, "masking_rate": 0.2},
    ]
    config = small_config(training__num_steps=10, training__phases=phases)
    seconds = speed.step_seconds(config, write_corpus(tmp_path))
    assert seconds == pytest.approx((6 * 2 + 4 * 4) / 10)
    assert rates == [0.3, 0.2]


def test_whole_batches_are_timed_even_longer_than_the_run(tmp_path, monkeypatch):
    """Batches of the warm-up were timed, and a run of three steps ended in an IndexError."""
    phase = {"length": 32, "batch_size": 16, "batch_warmup_steps": 3}
    config = small_config(training__phases=[phase], training__num_steps=3)
    timed: list[int] = []
    monkeypatch.setattr(speed, "jitted_init", lambda *_: lambda key: None)
    monkeypatch.setattr(speed, "make_train_step", lambda *_: lambda state, batch: (state, {}))
    monkeypatch.setattr(speed, "place_batch", lambda batch, _: timed.append(len(batch["tokens"])))
    monkeypatch.setattr(speed, "_MEASURED_SECONDS", 0.0)
    assert speed.step_seconds(config, write_corpus(tmp_path)) >= 0
    assert timed == [16] * 4
