"""The command line. Nothing heavy is imported until a command needs it."""

import gc
import sys
from typing import Annotated, NoReturn

import typer

from fedvl.commands import (
    audit,
    cite,
    compare,
    contributions,
    evaluate,
    federation,
    log,
    report,
    run,
    serve,
    show,
    survey,
    update,
    verify,
    withdraw,
)
from fedvl.errors import FedVLError
from fedvl.version import __version__

MAX_ERROR = 4000  # characters
NEW_OBJECTS = 50_000  # between collections: the million that imports make all stay, and a run makes few cycles

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    suggest_commands=False,  # Click does so already
    help="Adapt one pretrained vision-language model together, without pooling images.\n\n"
    "Start with [bold]fedvl run[/bold]: it needs no data, no download and no settings.",
)
app.command(epilog=run.EXAMPLES)(run.run)
app.command()(run.resume)
app.command(epilog=compare.COMPARE_EXAMPLES)(compare.compare)
app.command(epilog=compare.SWEEP_EXAMPLES)(compare.sweep)
app.command(epilog=compare.REPRODUCE_EXAMPLES)(compare.reproduce)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=verify.EXAMPLES)(verify.verify)
app.command()(verify.pack)
app.command()(verify.leaderboard)
app.command(epilog=cite.EXAMPLES)(cite.cite)
app.command(epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command()(log.log)
app.command(epilog=withdraw.EXAMPLES)(withdraw.withdraw)
app.command(epilog=update.EXAMPLES)(update.update)
app.command(epilog=contributions.EXAMPLES)(contributions.contributions)
app.command(epilog=audit.EXAMPLES)(audit.audit)
app.command()(serve.serve)
app.command()(serve.predict)
app.command()(serve.export)
app.command()(federation.server)
app.command()(federation.client)
app.command()(federation.status)
app.command()(survey.survey)
app.add_typer(federation.federation_app, name="federation")
app.add_typer(show.methods_app, name="methods")
app.command()(show.models)
app.add_typer(show.data_app, name="data")
app.add_typer(show.features_app, name="features")
app.command()(show.doctor)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def fail(sentence: str) -> NoReturn:
    """Print an error and exit; what a file of others made of it is neither obeyed nor endless."""
    from fedvl.display import shortened, visible

    print(f"Error: {shortened(visible(sentence), MAX_ERROR)}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    gc.set_threshold(NEW_OBJECTS)
    try:
        app()
    except FedVLError as error:
        fail(str(error))
    except OSError as error:  # a full disk, a folder without permission: the user's to mend
        fail(
            f"cannot read or write {error.filename or 'a file of the run'}: {error.strerror or error}; "
            "mend that, then repeat the command, or go on with fedvl resume: committed rounds are safe."
        )
    except KeyboardInterrupt:
        print(
            "Stopped; go on with fedvl resume; compare, sweep and reproduce go on with the same command.",
            file=sys.stderr,
        )
        sys.exit(130)


if __name__ == "__main__":
    main()
