"""Tasks of lm-evaluation-harness with their data, and how they are asked."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
from huggingface_hub import constants
from lm_eval import tasks as lm_eval_tasks
from lm_eval.tasks import TaskManager

from dms_train.evaluation.errors import EvaluationError
from dms_train.evaluation.harness.local_data import local_definitions

BETWEEN = "\n\n"  # of the examples and the question of a prompt, unless a task states another one
_SPEC = re.compile(r"(?P<name>.+?)(?P<suffix>@(?P<shots>\d+))?(:(?P<limit>\d+))?")
_PROMPT_ENDS = ("question", "examples")
_SCORED = ("multiple_choice", "loglikelihood")  # tasks that score given answers


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessOptions:
    """Tasks, and how they are asked.

    Attributes:
        tasks: Names of tasks, groups or tags, or paths of their YAML files. `NAME@SHOTS` and
            `NAME:LIMIT`, or `NAME@SHOTS:LIMIT`, replace `num_fewshot` and `limit` for one of them.
        include_path: Folder with further YAML files.
        num_fewshot: Examples before each question; None takes the task's own.
        limit: Number of documents of each task, or a share below 1; None takes all.
        gen_kwargs: Changes of `generation_kwargs`, such as `temperature=0.7,do_sample=true`.
        system_instruction: Text before every prompt.
        apply_chat_template: Turn prompts into chats by the model's template.
        prompt_end: Where the prompt ends for cache policies: `question`, or `examples` before it,
            at the last empty line. Only for tasks that score given answers.
        seed: Seed of the choice of examples and of sampled answers.
        data: Folder of data files that tasks read instead of the hub's; see `local_data`.
        download: Fetch data sets from the hub where they are absent.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    gen_kwargs: str | None = None
    system_instruction: str | None = None
    apply_chat_template: bool = False
    prompt_end: str = _PROMPT_ENDS[0]
    seed: int = 1234
    data: Path | None = None
    download: bool = False

    def __post_init__(self) -> None:
        if not self.tasks:
            raise EvaluationError("--tasks: give at least one")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise EvaluationError(f"--num-fewshot {self.num_fewshot}: 0 or more")
        if self.prompt_end not in _PROMPT_ENDS:
            raise EvaluationError(f"--prompt-end {self.prompt_end}: {' or '.join(_PROMPT_ENDS)}")
        if self.limit is not None and not (0 < self.limit < 1 or self.limit == int(self.limit) > 0):
            raise EvaluationError(f"--limit {self.limit:g}: whole documents, or a share below 1")


class LoadedTask(NamedTuple):
    """Task or group, and how it is asked.

    Attributes:
        item: Task or group of the harness.
        suffix: `@SHOTS` if the option named shots, otherwise empty. Added to names in the results,
            so that they may have one task with several shots.
        num_fewshot: Examples before each question; None takes the task's own.
        limit: Number of documents of each task, or a share below 1; None takes all.
    """

    item: Any
    suffix: str
    num_fewshot: int | None
    limit: float | None

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{_name(self.item)}{self.suffix}"

    @property
    def members(self) -> list[Any]:
        """The task; or the group, the groups in it, and their tasks."""
        if not hasattr(self.item, "get_all_tasks"):
            return [self.item]
        return [self.item, *self.item.get_all_groups(), *self.item.get_all_tasks()]

    @property
    def names(self) -> set[str]:
        """All names in the results: the key and those of the members."""
        return {f"{_name(member)}{self.suffix}" for member in self.members}

    def sha256(self, definitions: Mapping[str, Any]) -> str:
        """Return a hash of the definitions of all members.

        Args:
            definitions: From `LoadedTasks`; these files count by content instead of path.
        """
        stated = []
        for member in self.members:
            if not hasattr(member, "dump_config"):
                stated.append(member.aggregate_metric_list)
                continue
            config = member.dump_config()
            config.get("metadata", {}).pop("config_source", None)  # a temporary path with --data
            if (local := definitions.get(member.task_name)) is not None:
                config["dataset_kwargs"] = local
            stated.append(config)
        text = json.dumps(stated, default=str)
        # functions without source code are written with their address
        return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()


class LoadedTasks(NamedTuple):
    """Tasks with their data.

    Attributes:
        tasks: Tasks and groups in the order of the options.
        definitions: For each task that reads local files: its definition, files and changes.
    """

    tasks: list[LoadedTask]
    definitions: dict[str, Any]

    @property
    def keys(self) -> list[str]:
        """Names of the tasks and groups in the results."""
        return [task.key for task in self.tasks]

    @property
    def names(self) -> set[str]:
        """All names that the tasks and groups have in the results."""
        return set().union(*(task.names for task in self.tasks))


def load_tasks(options: HarnessOptions) -> LoadedTasks:
    """Load the tasks and groups with their data, from this machine unless `download`.

    Raises:
        EvaluationError: A task is not known or not supported, or is named twice with the same
            shots or as a member of a group, or its data set is not there.
    """
    asked = [_parsed(spec, options) for spec in dict.fromkeys(options.tasks)]
    manager = _manager(options, {name for name, _ in asked})
    with contextlib.ExitStack() as stack:
        stack.enter_context(_network(allowed=options.download))
        local: dict[str, Any] = {}
        if options.data is not None:
            definitions = local_definitions(manager.task_index, options.data)
            local = stack.enter_context(definitions)
        # loaded once for each number of shots, because the harness stores it in the task
        entries = [_load(manager, name, download=options.download) for name, _ in asked]
    if options.prompt_end == "examples":
        for task in itertools.chain.from_iterable(entry["tasks"].values() for entry in entries):
            _require_examples(task)
    found = [
        how._replace(item=item)
        for (_, how), entry in zip(asked, entries, strict=True)
        for item in _top_level(entry)
    ]
    names = {name for entry in entries for name in entry["tasks"]}
    tasks = LoadedTasks(found, {name: local[name] for name in sorted(names & set(local))})
    for first, second in itertools.combinations(found, 2):
        _require_other_names(first, second)
    return tasks


def _require_examples(task: Any) -> None:
    """Fail if the end of the examples has no meaning in a task, or is not at an empty line."""
    config = task.config
    if config.output_type not in _SCORED or config.fewshot_delimiter != BETWEEN:
        raise EvaluationError(
            f"--prompt-end examples: {task.task_name} scores no given answers, or has no empty "
            "line before its question; use --prompt-end question"
        )


def _require_other_names(first: LoadedTask, second: LoadedTask) -> None:
    """Refuse two tasks that would replace each other's results."""
    if first.key == second.key:
        raise EvaluationError(f"--tasks: {first.key} is named twice; name it once")
    if both := first.names & second.names:
        name = min(both, key=lambda name: (name not in (first.key, second.key), name))
        other = second.key if name == first.key else first.key
        raise EvaluationError(
            f"--tasks: {name} is also part of {other}; use {_name(second.item)}@SHOTS or another "
            "--output"
        )


def _name(item: Any) -> str:
    return str(getattr(item, "task_name", None) or item.name)


def _parsed(spec: str, options: HarnessOptions) -> tuple[str, LoadedTask]:
    """Split NAME@SHOTS:LIMIT into the name and the task, which is not loaded yet."""
    match = _SPEC.fullmatch(spec)
    assert match is not None
    shots, limit = match["shots"], match["limit"]
    if limit is not None and int(limit) == 0:
        raise EvaluationError(f"--tasks {spec}: the limit must be 1 or more")
    return match["name"], LoadedTask(
        item=None,
        suffix=match["suffix"] or "",
        num_fewshot=options.num_fewshot if shots is None else int(shots),
        limit=options.limit if limit is None else int(limit),
    )


def _top_level(entry: dict[str, Any]) -> list[Any]:
    """Return the outermost groups of a name, or its tasks; refuse tasks that run programs."""
    for key, task in entry["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise EvaluationError(
                f"task {key}: runs programs that the model wrote without limits; use "
                "dms-eval task.name=humaneval (or livecodebench) --allow-code for programs"
            )
    groups = entry.get("groups", {})
    nested = {child for group in groups.values() for child in group.child_names}
    return [group for key, group in groups.items() if key not in nested] or list(
        entry["tasks"].values()
    )


@contextlib.contextmanager
def _network(*, allowed: bool) -> Iterator[None]:
    """Keep data sets from being fetched inside, unless it is allowed."""
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not allowed:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _manager(options: HarnessOptions, names: set[str]) -> Any:
    """Return a manager that knows the tasks of these names."""
    include = options.include_path
    if include is not None and not include.is_dir():
        raise EvaluationError(f"--include-path {include}: no such folder")
    own = [] if include is None else [str(include)]
    manager = TaskManager(include_path=own, include_defaults=False)
    if _is_complete(manager, names):
        return manager
    manager = _manager_of_mentions(names, own)
    return manager if names <= set(manager.all_tasks) else TaskManager(include_path=own)


def _manager_of_mentions(names: set[str], further: list[str]) -> Any:
    """Return a manager of the harness' folders that mention these names, and of further folders.

    Names of members of a group count too. To parse all 14,000 definitions takes seconds to tens of
    seconds; these folders have some hundreds.
    """
    texts = {
        folder: _definitions(folder) for folder in Path(lm_eval_tasks.__file__).parent.iterdir()
    }
    before: set[str] = set()
    while before != names:
        words = "|".join(map(re.escape, names))
        mention = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])".encode())
        folders = [str(folder) for folder, text in texts.items() if mention.search(text)]
        # the last folder counts for a name; the harness takes the first of its own
        paths = [*sorted(folders, reverse=True), *further]
        manager = TaskManager(include_path=paths, include_defaults=False)
        before, names = names, names | _members_of(manager, names)
    return manager


def _is_complete(manager: Any, names: set[str]) -> bool:
    """Return True if a manager knows tasks and groups with all their members.

    A tag is never complete, because the harness may have further tasks with it.
    """
    entries = [manager.task_index.get(name) for name in names]
    if not all(entry and entry.cfg for entry in entries):
        return False
    members = _members_of(manager, names)
    return members <= names or _is_complete(manager, names | members)


def _members_of(manager: Any, names: set[str]) -> set[str]:
    entries = [manager.task_index.get(name) for name in names]
    return set().union(
        *(_members(entry.cfg.get("task")) for entry in entries if entry and entry.cfg)
    )


def _definitions(folder: Path) -> bytes:
    """Return the text of all definitions below a folder; included ones may have no suffix."""
    files = (file for file in folder.rglob("*") if file.suffix in ("", ".yaml"))
    return b"\n".join(file.read_bytes() for file in files if file.is_file())


def _members(listed: Any) -> set[str]:
    """Return the names in the key `task` of a task or group."""
    if isinstance(listed, dict):
        return _members(listed.get("task")) | _members(listed.get("group"))
    if isinstance(listed, list):
        return set().union(*map(_members, listed))
    return {listed} if isinstance(listed, str) else set()


def _load(manager: Any, name: str, *, download: bool) -> dict[str, Any]:
    known = name in manager.all_tasks or Path(name).is_file()
    if not known:
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; see --include-path"
        raise EvaluationError(f"task {name}: lm-evaluation-harness has no such task{hint}")
    try:
        loaded: dict[str, Any] = manager.load([name])
    except ModuleNotFoundError as error:
        raise EvaluationError(
            f"task {name}: needs the package {error.name}; install it, pip install {error.name}"
        ) from None
    except Exception as error:  # errors of the hub, of data sets, of the task's own code
        reason = " ".join(str(error).split())[:200]
        absent = isinstance(error, FileNotFoundError | ConnectionError)
        hint = "; --download fetches what is not on this disk" if absent and not download else ""
        raise EvaluationError(f"task {name}: {reason}{hint}") from None
    return loaded
