# SPDX-License-Identifier: Apache-2.0
"""`headrace bench throughput | latency | serve | compare`."""

import json
import os
import sys
from typing import Any

from headrace.bench.arrivals import check_arrivals
from headrace.bench.compare import load_reports, print_comparison
from headrace.bench.plan import Outputs, Workload, check_levels, run_until_done
from headrace.bench.plot import check_plot, draw
from headrace.bench.report import Report
from headrace.bench.run_engine import EnginePlan, EngineRun
from headrace.bench.run_server import ServerPlan, ServerRun
from headrace.bench.screen import Screen
from headrace.bench.server_target import PATHS, Endpoint
from headrace.bench.table import print_report
from headrace.cli.flags import Invocation
from headrace.cli.settings import log_settings, read_settings, set_log_level
from headrace.errors import ConfigError, UserError

LOWEST = (1,)
"""Concurrency of `latency`, unless told otherwise."""


def throughput(invocation: Invocation) -> int:
    """Measure an engine loaded here at its limit; returns the exit code."""
    return _engine(invocation, "throughput", None)


def latency(invocation: Invocation) -> int:
    """Measure an engine loaded here with one request at a time; returns the exit code."""
    return _engine(invocation, "latency", LOWEST)


def _engine(invocation: Invocation, kind: str, usual: tuple[int, ...] | None) -> int:
    options = invocation.options
    set_log_level(options["log_level"])
    if options["model_path"] is not None:
        if invocation.model is not None:
            invocation.layer.put(("served_model_name",), invocation.model, "--model")
        invocation.layer.put(("model",), options["model_path"], "--model_path")
    settings = read_settings(invocation)
    log_settings(invocation, settings)
    plan = EnginePlan(
        kind=kind,
        args=settings.args,
        workload=_workload(options),
        outputs=_outputs(options),
        levels=_levels(options, "concurrency") or usual,
        warmup=_at_least_0(options, "warmup"),
        streaming=options["streaming"],
        trace_steps=None if options["trace_steps"] is None else _at_least_0(options, "trace_steps"),
    )
    screen = Screen()
    report = Report(kind, plan.outputs.report_json)
    return _finish(EngineRun(plan, report, screen), report, plan.outputs, screen)


def serve(invocation: Invocation) -> int:
    """Put load on a server; returns the exit code."""
    options = invocation.options
    set_log_level(options["log_level"])
    if not options["url"]:
        raise UserError("bench serve needs a server: --url http://127.0.0.1:8000.", param="url")
    check_arrivals(options["request_rate"], options["burstiness"])
    if options["num_gpus"] < 1:
        raise ConfigError(f"num_gpus must be at least 1, but is {options['num_gpus']}.", param="num_gpus")
    plan = ServerPlan(
        url=options["url"],
        workload=_workload(options),
        outputs=_outputs(options),
        levels=_levels(options, "max_concurrency"),
        endpoint=_endpoint(options["endpoint"]),
        model=options["model"],
        api_key=options["api_key"] or os.environ.get("OPENAI_API_KEY"),
        model_path=options["model_path"],
        num_gpus=options["num_gpus"],
        request_rate=options["request_rate"],
        burstiness=options["burstiness"],
        warmup=_at_least_0(options, "warmup"),
        extra_body=_extra_body(options["extra_body"]),
    )
    screen = Screen()
    report = Report("serve", plan.outputs.report_json)
    return _finish(ServerRun(plan, report, screen), report, plan.outputs, screen)


def compare(invocation: Invocation) -> int:
    """Show reports side by side; returns 0."""
    set_log_level(invocation.options["log_level"])
    plot = invocation.options["plot"]
    check_plot(plot)
    reports = load_reports(invocation.files)
    print_comparison(reports)
    if plot is not None:
        Screen().say(f"The picture is in {draw(reports, plot)}.")
    return 0


def _finish(run: EngineRun | ServerRun, report: Report, outputs: Outputs, screen: Screen) -> int:
    """Run, and show what came of it, whatever ended it."""
    code = run_until_done(run.run())
    print_report(report.values)
    if outputs.report_json is not None:
        screen.say(f"The report is in {outputs.report_json}.")
    if outputs.plot is not None and report.levels:
        screen.say(f"The picture is in {draw([(report.values['kind'], report.values)], outputs.plot)}.")
    if report.values["is_partial"]:
        sys.stderr.write(f"headrace: The run was cut short: {report.values['partial_reason']}.\n")
    return code


def _workload(options: dict[str, Any]) -> Workload:
    workload = Workload(
        dataset=options["dataset"],
        # TensorRT-LLM's 0 is the whole file.
        num_requests=options["num_requests"] or None,
        input_len=options["input_len"],
        output_len=options["output_len"],
        random_seed=options["random_seed"],
        temperature=options["temperature"],
        ignore_eos=options["ignore_eos"],
        warm_cache=options["warm_cache"],
    )
    workload.check()
    return workload


def _outputs(options: dict[str, Any]) -> Outputs:
    check_plot(options["plot"])
    return Outputs(options["report_json"], options["plot"], options["ceilings"])


def _levels(options: dict[str, Any], name: str) -> tuple[int, ...] | None:
    levels = options[name]
    # TensorRT-LLM's -1 is no limit.
    if levels is None or levels == [-1]:
        return None
    check_levels(name, levels)
    return tuple(levels)


def _at_least_0(options: dict[str, Any], name: str) -> int:
    value = int(options[name])
    if value < 0:
        raise ConfigError(f"{name} must not be negative, but is {value}.", param=name)
    return value


def _endpoint(name: str) -> Endpoint:
    for known in PATHS:
        if name in (known, known.removesuffix("s"), PATHS[known].strip("/")):
            return known
    raise ConfigError(f"endpoint must be completions or chat, but is {name}.", param="endpoint")


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"extra_body is not JSON: {error}.", param="extra_body") from None
    if not isinstance(values, dict):
        raise ConfigError('extra_body must be a JSON object, such as {"top_p": 0.9}.', param="extra_body")
    return values
