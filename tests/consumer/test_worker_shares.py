"""How many samples of a batch each worker made, for metrics and monitors."""

from rollq.consumer.batches.worker_shares import INSERTED, MOST_NAMED, described


def test_the_workers_of_a_batch_are_named_with_their_samples() -> None:
    assert described({"b": 8, "a": 24}) == {"workers": {"a": 24, "b": 8}}


def test_of_many_workers_those_with_the_most_samples_are_named_and_the_others_counted() -> None:
    found = described({f"w{number}": number for number in range(1, 1001)})
    assert list(found["workers"]) == [f"w{number}" for number in range(1000, 1000 - MOST_NAMED, -1)]
    assert sum(found["workers"].values()) + found["other_samples"] == 500_500


def test_inserted_samples_are_counted_apart() -> None:
    assert described({"a": 24, INSERTED: 40}) == {"workers": {"a": 24}, "inserted_samples": 40}
    assert described({INSERTED: 40}) == {"workers": {}, "inserted_samples": 40}
