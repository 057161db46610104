"""What a stack runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specrag_client.proxies import loopback_exemption
from specrag_client.stack.layout import StackFolder
from specrag_client.stack.options import StackOptions, UserFolders
from specrag_client.stack.plan import StackPlan, drafter_names, kind_of
from specrag_client.stack.servers import find_redis_server, milvus_command, redis_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest


def plan(num_cores: int = 4, **fields: object) -> StackPlan:
    options = StackOptions(directory=Path("/stack"), **{"environment": {}, **fields})  # type: ignore[arg-type]
    return StackPlan(options, StackFolder.at(Path("/stack")), num_cores=num_cores)


def test_verifier_gets_the_cores_and_the_others_one_each() -> None:
    chosen = plan(num_cores=4)
    threads = {
        spec.name: spec.environment["OMP_NUM_THREADS"]
        for spec in (chosen.verifier(), chosen.drafter("drafter-0"), chosen.retriever("http://m"))
    }
    assert threads == {"verifier": "4", "drafter-0": "1", "retriever": "1"}
    assert chosen.verifier().environment["SPECRAG_VERIFIER_NUM_THREADS"] == "4"
    assert chosen.drafter("drafter-0").environment["SPECRAG_DRAFTER_NUM_THREADS"] == "1"


def test_addresses_reach_the_orchestrator() -> None:
    spec = plan().orchestrator(
        retriever="h:1", verifier="h:2", drafters=["h:3", "h:4"], redis_url="redis://h:5"
    )
    assert settings(spec.environment) >= {
        "SPECRAG_ORCHESTRATOR_RETRIEVER_ADDRESS=h:1",
        "SPECRAG_ORCHESTRATOR_VERIFIER_ADDRESS=h:2",
        "SPECRAG_ORCHESTRATOR_DRAFTER_ADDRESSES=h:3,h:4",
        "SPECRAG_ORCHESTRATOR_REDIS_URL=redis://h:5",
        "SPECRAG_ORCHESTRATOR_PORT=0",
        "SPECRAG_ORCHESTRATOR_PORT_FILE=/stack/run/orchestrator.port",
        "SPECRAG_ORCHESTRATOR_TRACE_FILE=/stack/traces/orchestrator.jsonl",
    }
    assert list(spec.command)[-2:] == ["-m", "specrag_orchestrator"]


def test_settings_of_a_service_come_from_the_environment_and_reach_only_it() -> None:
    environment = {
        "PATH": "/bin",
        "SPECRAG_VERIFIER_DTYPE": "float32",
        "SPECRAG_VERIFIER_NUM_THREADS": "3",
        "SPECRAG_VERIFIER_PORT": "99",
    }
    chosen = plan(environment=environment)
    verifier = chosen.verifier().environment
    assert verifier["SPECRAG_VERIFIER_DTYPE"] == "float32"
    assert verifier["SPECRAG_VERIFIER_NUM_THREADS"] == "3"
    assert verifier["SPECRAG_VERIFIER_PORT"] == "0"
    drafter = chosen.drafter("drafter-0").environment
    assert drafter["PATH"] == "/bin"
    assert not [key for key in drafter if key.startswith("SPECRAG_VERIFIER")]
    assert not [key for key in chosen.server("redis", []).environment if key.startswith("SPECRAG_")]


def test_settings_of_one_process_win() -> None:
    chosen = plan(
        environment={"SPECRAG_DRAFTER_DTYPE": "bfloat16"},
        settings={"drafter-1": {"DTYPE": "float32"}},
    )
    dtypes = [
        chosen.drafter(name).environment["SPECRAG_DRAFTER_DTYPE"]
        for name in ("drafter-0", "drafter-1")
    ]
    assert dtypes == ["bfloat16", "float32"]


def test_target_model_also_measures_passages() -> None:
    chosen = plan(target_model="owner/model", draft_model="owner/small")
    assert chosen.verifier().environment["SPECRAG_VERIFIER_MODEL"] == "owner/model"
    assert chosen.drafter("drafter-0").environment["SPECRAG_DRAFTER_MODEL"] == "owner/small"
    retriever = chosen.retriever("http://m:1").environment
    assert retriever["SPECRAG_RETRIEVER_PASSAGE_TOKENIZER"] == "owner/model"
    assert "SPECRAG_RETRIEVER_PASSAGE_TOKENIZER" not in plan().retriever("http://m:1").environment


def test_proxy_is_kept_out_of_loopback_and_other_exemptions_stay() -> None:
    assert loopback_exemption({}) == {"no_grpc_proxy": "127.0.0.1,localhost,::1"}
    for variable in ("no_proxy", "no_grpc_proxy"):
        spec = plan(environment={variable: "a.example, localhost"}).verifier()
        assert spec.environment["no_grpc_proxy"] == "a.example,localhost,127.0.0.1,::1"


def test_names_of_drafters_and_their_kind() -> None:
    options = StackOptions(directory=Path("/stack"), num_drafters=3, environment={})
    assert drafter_names(options) == ["drafter-0", "drafter-1", "drafter-2"]
    assert [kind_of(name) for name in ("drafter-2", "verifier")] == ["drafter", "verifier"]


def test_model_cache_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert UserFolders().model_cache == Path("/cache/specrag/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert UserFolders().model_cache == Path("/home/me/.cache/specrag/models")


def test_milvus_runs_with_one_worker_on_loopback_only() -> None:
    command = " ".join(milvus_command(data_dir=Path("/d"), port=7))
    assert "--max-workers 1" in command
    assert "--host 127.0.0.1 --port 7" in command


def test_redis_keeps_every_turn_and_evicts_none() -> None:
    command = " ".join(redis_command(Path("redis-server"), data_dir=Path("/d"), port=7))
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--bind 127.0.0.1" in command


def test_redis_on_path_wins_over_the_bundled_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server().name == "valkey-server"
    own = tmp_path / "redis-server"
    own.touch(mode=0o755)
    assert find_redis_server() == own


def settings(environment: Mapping[str, str]) -> set[str]:
    return {f"{key}={value}" for key, value in environment.items()}
