"""The job: the content of a TOML file as one typed value. Reading and refusing are in job_file.py."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Annotated, Any, Final, Literal

from headway.daemon.jobs.typed_toml import NOT_IN_FILES
from headway.optim.spec import OptimSpec
from headway.stages.data.source_choice import STDLIB
from headway.stages.plugin_names import Settings, is_import_path
from headway.stages.spec import ModelSpec, TrainSpec, layer_names
from headway.stages.state.file_digest import FileDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    """`[job]`"""

    name: str
    seed: Annotated[int, (0, 2**63 - 1, "a seed has 63 bits")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginPart(FileDigest):
    """One part of a model's folder: the weights of a layer, or the files that an export carries over."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginSpec:
    """The folder with the initial weights. It is no section of a job file: `[model] from` names the folder."""

    url: str = ""
    """Path or URL; empty: the weights are random."""
    adapter: str = ""
    """Path or URL of the folder with the adapters that the job begins with; empty: the seed says them."""
    job: str = ""
    """Job for which the parts were read: its name stands in their files. Another job, if this one continues it."""
    ignored: tuple[str, ...] = ()
    """Keys of its config.json that nobody here knows, and that the job's author lets go: `[model] ignore`."""
    parts: tuple[OriginPart, ...] = ()
    """Digest of each part's file, filled in when the job is submitted."""

    def digest_of(self, name: str) -> FileDigest | None:
        """Return the size and checksum of a part; None: there is no such part."""
        return next((part.digest for part in self.parts if part.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """`[[data.sources]]`"""

    source: str
    weight: float = 1.0
    """Its share of the rows is this number over the sum of all weights."""
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """`[data]`"""

    source: str = STDLIB
    """`python-stdlib`, `headway-docs`, or a folder made by `headway data prepare`; the import path of a plug-in, until
    that has run.
    """
    sha256: str = ""
    """SHA-256 of the token shards in order; filled in when the job is submitted, checked when the data is opened."""
    sources: tuple[SourceSpec, ...] = ()
    """Two or more: then `source` is empty, and `sha256` the name of all of them."""
    settings: Settings = ()
    """Of a plug-in: its keywords."""

    @property
    def parts(self) -> tuple["DataSpec", ...]:
        """Return each source by itself, in order."""
        return tuple(DataSpec(source=each.source, sha256=each.sha256) for each in self.sources) or (self,)

    @property
    def part_keys(self) -> tuple[str, ...]:
        """Return where a job file names each of `parts`: the key without its last word."""
        return tuple(f"data.sources[{index}]" for index in range(len(self.sources))) or ("data",)

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weight of each of `parts`."""
        return tuple(each.weight for each in self.sources) or (1.0,)


TOO_MUCH: Final = "no device computes a microbatch of it"


PLUGINS: Final = "plug-ins "
"""Begins the name of the ailment that a node cannot import code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsSpec:
    """`[plugins]`"""

    wheel: str = ""
    """Path of a wheel with the job's own code, or of one module, NAME.py; empty: it has none."""
    sha256: str = ""
    """SHA-256 of the wheel; filled in when the job is submitted, checked wherever its code is imported."""
    data: DataSpec = field(default_factory=lambda: DataSpec(source=""), metadata={NOT_IN_FILES: True})
    """The wheel as a data set of one shard, in which form it travels."""
    block_flops: Annotated[float, (0, 1e21, TOO_MUCH)] = field(default=0.0, metadata={NOT_IN_FILES: True})
    """Operations of a plug-in's block in the forward of a microbatch; counted when the job is submitted."""
    block_values: Annotated[int, (0, 10**15, TOO_MUCH)] = field(default=0, metadata={NOT_IN_FILES: True})
    """Values that it keeps of a microbatch for its backward."""

    @property
    def ailment(self) -> str:
        """Name the ailment of a node: it cannot import this code."""
        return f"{PLUGINS}{self.sha256[:16]}"

    def why_not_on(self, node: str, allowed: Collection[str], ailments: Mapping[str, str]) -> str:
        """Return why a node does not run the wheel's code; empty: it does, or there is none. allowed: its setting."""
        if self.sha256 and not {"any", self.sha256} & {*allowed}:
            return f"node {node} does not allow the plug-ins of {self.wheel}: its allow_plugins lacks {self.sha256}"
        reason = ailments.get(self.ailment, "")
        return f"node {node} cannot import the plug-ins of {self.wheel}: {reason}" if reason else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """`[fault]`"""

    snapshot_every: Annotated[int, (0, 10**6, "a failure would recompute all of it")] = 20
    """Interval in batches; 0 turns periodic snapshots off."""
    copies: Annotated[int, (1, 16, "each copy is sent over the network")] = 2
    """Number of nodes that hold each layer of a boundary; fewer if the cluster has fewer nodes."""
    checkpoint_every: Annotated[int, (0, 10**6, "all of it would be computed again")] = 100
    """Interval in batches; 0: only at pause and at the end."""
    checkpoints_kept: Annotated[int, (1, 1000, "every record of a checkpoint names them all")] = 2
    """Number of newest checkpoints that stay."""
    checkpoint_dir: str = "checkpoints"
    """Any fsspec URL; a relative path is resolved in a local cluster's state folder."""
    link_timeout_s: Annotated[float, (1, 3600, "the job stands still for so long")] = 30.0
    """Time for a broken link to resume before its stage gives up."""
    non_finite: Literal["stop", "continue"] = "stop"
    """Reaction to a loss that is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSpec:
    """`[placement]`"""

    min_nodes: Annotated[int, (1, 10**4, "no cluster has so many")] = 1
    max_nodes: Annotated[int, (0, 10**4, "no cluster has so many; 0 means no limit")] = 0
    """Maximum number of nodes; 0: no limit."""
    sites: tuple[str, ...] = ()
    """Sites whose nodes the job may use; empty: all."""
    replicas: tuple[int, ...] = ()
    """Number of workers of each stage, from the first stage to the last; empty: the planner chooses."""
    recut: bool = True
    """True if measurements alone may move a running job to a better plan; otherwise only joins and departures do."""
    share_updates: Literal["auto", "always", "never"] = "auto"
    """Whether each replica of a stage orthogonalises a share of its matrices; `auto`: where the plan expects a gain."""
    split_blocks: bool = False
    """Whether the halves of each block, attention and MLP, are layers of their own, so that a plan may cut between
    them. It changes no bit.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """`[queue]`: does not affect bits, only when and on how many nodes the job runs."""

    priority: Annotated[int, (-10, 10, "priorities go from -10 to 10")] = 0
    """Priority: higher jobs start first, and running jobs of a lower priority give way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSpec:
    """`[report]`: where `run` writes the job's history. Affects no bits; workers never see it.

    Nobody else obeys it unasked: somebody who looks at another's job would write there with rights of his own.
    """

    jsonl: str = ""
    """A file on the machine of `run`, as each path here; empty: none."""
    tensorboard: str = ""
    """A folder, which gets one for the job."""
    wandb: Literal["", "offline", "online"] = ""

    @property
    def options(self) -> list[str]:
        """Return the options of `headway history` that write there; none: it is written nowhere."""
        places = {"--jsonl": self.jsonl, "--tensorboard": self.tensorboard, "--wandb": self.wandb}
        return [f"{name}={place}" for name, place in places.items() if place]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One training run. Equal specs give equal bits on equal arithmetic, in any cluster."""

    job: JobSection
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    fault: FaultSpec = field(default_factory=FaultSpec)
    placement: PlacementSpec = field(default_factory=PlacementSpec)
    queue: QueueSpec = field(default_factory=QueueSpec)
    report: ReportSpec = field(default_factory=ReportSpec)
    plugins: PluginsSpec = field(default_factory=PluginsSpec)
    origin: OriginSpec = field(default_factory=OriginSpec, metadata={NOT_IN_FILES: True})

    def value_of(self, key: str) -> Any:
        """Return the value of a key such as `optim.matrices.lr`."""
        return reduce(getattr, key.split("."), self)

    def with_values(self, values: Mapping[str, object]) -> "JobSpec":
        """Return the job with other values, by key."""
        return reduce(lambda spec, key: _with(spec, key, values[key]), values, self)

    def with_link(self, link: Literal["auto", "grpc", "collective"] | None) -> "JobSpec":
        """Return the job over other links; None: unchanged."""
        return self if link is None else self.with_values({"train.link": link})

    def with_priority(self, priority: int | None) -> "JobSpec":
        """Return the job with another priority; None: unchanged."""
        return self if priority is None else self.with_values({"queue.priority": priority})

    @property
    def plugin_names(self) -> dict[str, str]:
        """Return the import path of each plug-in that the job names, by key."""
        groups = {"optim.matrices.name": self.optim.matrices, "optim.rest.name": self.optim.rest}
        named = {key: group.name for key, group in groups.items() if group.is_plugin}
        named |= {"data.source": self.data.source} if is_import_path(self.data.source) else {}
        named |= {"train.loss": self.train.loss} if self.train.has_own_loss else {}
        return named | ({"model.block": self.model.block} if self.model.has_own_block else {})

    @property
    def data_sets(self) -> tuple[DataSpec, ...]:
        """Return all that nodes fetch as data: each source, and the wheel."""
        return (*self.data.parts, *([self.plugins.data] if self.plugins.sha256 else []))

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the model's layers in order."""
        return layer_names(self.model, are_split=self.placement.split_blocks)


def _with(value: Any, key: str, told: object) -> Any:
    name, _, inside = key.partition(".")
    return replace(value, **{name: _with(getattr(value, name), inside, told) if inside else told})


PLAIN_S: Final = 120.0
"""Time to import the model, open the data and report."""
COMPILING_S: Final = 600.0
"""Additional time to compile every kind of layer: half a minute on its own core, and workers of a machine
share cores.
"""


def preparation_s(train: TrainSpec) -> float:
    """Return the maximum time from the order to the answer."""
    return COMPILING_S if train.compile else PLAIN_S


def shares_text(data: DataSpec) -> str:
    """Return `75 % /data/chats, 25 % /data/code`; empty: there is one source."""
    total = sum(data.weights)
    return ", ".join(f"{100 * each.weight / total:.3g} % {each.source}" for each in data.sources)
