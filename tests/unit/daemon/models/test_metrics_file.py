"""metrics.jsonl has each batch once, in order, to the last bit, over any number of runs."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import headway
from headway.daemon.base.errors import ConfigError
from headway.daemon.reports.metrics_file import METRICS_NAME, HistoryRow, MetricsFile, read_rows


def append(metrics: MetricsFile, batch: int, loss: float = 1.0) -> None:
    metrics.append(HistoryRow(batch=batch, loss=loss, learning_rate=0.5, tokens=64, seconds=0.5, generation=2))


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_losses_read_back_to_the_last_bit(tmp_path: Path) -> None:
    """Numbers without a short decimal form survive as the same float64."""
    losses = [0.1 + 0.2, 1 / 3, 5.577652335166931, 1e-300, 2.0]
    with MetricsFile(tmp_path / "out" / "metrics.jsonl") as metrics:
        for batch, loss in enumerate(losses):
            append(metrics, batch, loss)
    found = lines(tmp_path / "out" / "metrics.jsonl")
    assert [line["loss"] for line in found] == losses
    assert found[0] == {
        "batch": 0,
        "loss": 0.1 + 0.2,
        "learning_rate": 0.5,
        "tokens": 64,
        "seconds": 0.5,
        "generation": 2,
    }


def test_a_resumed_file_takes_each_batch_once(tmp_path: Path) -> None:
    """Batches 0 to 2, a new process that tells 1 to 4: five lines, the old ones untouched."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for batch in range(3):
            append(metrics, batch, 1.0)
    with MetricsFile(path, is_resumed=True) as metrics:
        assert metrics.last_batch == 2
        for batch in range(1, 5):
            append(metrics, batch, 9.0)
    assert [(line["batch"], line["loss"]) for line in lines(path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0)]


def test_a_torn_line_is_written_again(tmp_path: Path) -> None:
    """The last line lacks its end, as after a crash: it is dropped, and its batch can come again."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        append(metrics, 0)
        append(metrics, 1)
    path.write_bytes(path.read_bytes()[:-3])
    with MetricsFile(path, is_resumed=True) as metrics:
        assert metrics.last_batch == 0
        append(metrics, 1)
    assert [line["batch"] for line in lines(path)] == [0, 1]


def test_a_new_file_replaces_the_old(tmp_path: Path) -> None:
    """Not resumed: what lay there is gone, from the start."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("anything\n")
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_batches_whose_rows_are_lost_have_no_line(tmp_path: Path) -> None:
    """After batch 0 comes 2, and the file is continued after it."""
    path = tmp_path / "metrics.jsonl"
    for batches in ((0, 2), (1, 2, 3)):
        with MetricsFile(path, is_resumed=True) as metrics:
            for batch in batches:
                append(metrics, batch)
    assert [json.loads(line)["batch"] for line in path.read_text().splitlines()] == [0, 2, 3]


@pytest.mark.parametrize("content", ["no json\n", '{"loss": 1}\n', "[1]\n", '{"batch": "1"}\n', '{"batch": -1}\n'])
def test_a_file_of_another_kind_is_not_resumed(tmp_path: Path, content: str) -> None:
    """The line is named and the file stays as it was."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: line 1 is"):
        MetricsFile(path, is_resumed=True)
    assert path.read_text() == content


def test_a_diverged_batch_is_read_back(tmp_path: Path) -> None:
    """Its loss is no number and its norm is infinite: the file that one wants to look at is readable."""
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        row = HistoryRow(batch=0, loss=math.nan, learning_rate=0.5, tokens=64, seconds=0.5, generation=2)
        metrics.append(replace(row, gradient_norm=math.inf))
    (found,) = read_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(found.loss)
    assert found.gradient_norm is not None
    assert math.isnan(found.gradient_norm)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text(), "JSON has no such number"


def test_python_reads_a_loss_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with `non_finite = "continue"` has diverged: its file says null, and its rows NaN, as those of a run."""

    def trained(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        with MetricsFile(Path(words[words.index("--out") + 1]) / METRICS_NAME) as file:
            file.append(HistoryRow(batch=0, loss=math.nan, learning_rate=0.1, tokens=1, seconds=0.1, generation=0))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr("headway.client.subprocess.run", trained)
    [row] = headway.reference("job.toml")
    assert math.isnan(row.loss)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second one is refused in a line and changes nothing; when the first has closed the file, it goes on."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, is_resumed=True) as first:
        append(first, 0)
        with pytest.raises(ConfigError, match="another process writes to it now"):
            MetricsFile(path)
        append(first, 1)
    with MetricsFile(path, is_resumed=True) as second:
        assert second.last_batch == 1
