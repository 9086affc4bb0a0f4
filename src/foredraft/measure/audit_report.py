"""An audit as a table and a verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from foredraft.measure.audit import Audit

WORDS = {True: "[green]passed[/]", False: "[red]FAILED[/]", None: "[yellow]not made[/]"}


def print_audit(audit: Audit, console: Console, *, self_test: bool) -> None:
    """Prints what each check saw, the findings, what was not covered, and the verdict."""
    table = Table(title="Self-test of the audit" if self_test else "Audit of losslessness")
    table.add_column("check")
    table.add_column("cases", justify="right")
    table.add_column("result")
    table.add_column("seen", overflow="fold")
    for check in audit.checks:
        table.add_row(check.name, f"{check.cases:,}", WORDS[check.passed], check.detail)
    console.print(table)
    for check in audit.checks:
        for finding in check.findings[:10] if not self_test else []:
            shown = ", ".join(f"{key} {value}" for key, value in finding.items())
            console.print(f"  {check.name}: {shown}")
    for missing in audit.not_covered:
        console.print(f"  not covered: {missing}")
    if self_test:
        verdict = "every fault was found" if audit.lossless else "a fault was NOT found: raise --samples"
    elif not audit.lossless:
        verdict = "speculation changed the output: see the failed checks"
    elif any(check.passed is None for check in audit.checks):
        verdict = "no fault found, but not every check could be made"
    else:
        verdict = "lossless as far as tested"
    console.print(f"verdict: {verdict}")
