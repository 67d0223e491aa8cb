"""Every failure that a sentence explains to the user. Its text names the value, the bound and the way out.

SojournError                  exit code 1
├── InputError                exit code 2: an option, argument or file of the user cannot be used
│   ├── ScenarioError         loadgen.errors: one sentence for each fault
│   ├── TemplateError         engine.token.text.template: the model's chat template refuses the messages
│   │   ├── OutputTooLong     the prompt is longer than its bound
│   │   ├── TooMuchToRender   it takes more time or memory than its bound
│   │   ├── TemplateFault     the template fails, whatever the messages
│   │   └── TemplatesBusy     no process could render in time
│   ├── NotComparable         metrics.compare.runs: unless it is forced
│   ├── GrammarError          engine.techniques.grammar.grammar
│   └── BenchError            bench.results
├── RunDataError              a run directory cannot be read, or lacks what is needed
│   └── TooLarge              metrics.request.offenders: it does not fit in memory
├── CalibrationError          this machine was not calibrated, or the calibration does not cover the case
├── ReplayError               a recorded run cannot be replayed, or not with this change
├── ModelError                a checkpoint cannot be served, or not with these settings on this machine
├── ServerError               a server cannot start, does not answer, or ended
│   ├── EndpointError         loadgen.target.endpoint
│   ├── ServerDied            loadgen.target.processes: during a load
│   ├── ReplyFault            loadgen.replies.reply: the reply is not OpenAI's format
│   └── CoreLost              engine.server.core.sequence: the core died, or it drains
├── ExperimentError           a run, a search or a calibration cannot start or go on
├── BuildError                engine.compute.cpp.extension: the C++ kernels cannot be built
├── ClientFailed              bench.load_generators.accuracy
├── LLMError                  engine.llm
├── PackageMissing            metrics.installed: an answer needs a package that is not installed
└── ApiError                  engine.server.errors: with the HTTP status of the refusal
"""


class SojournError(Exception):
    """The base of them all. The command line prints the sentence and ends with `exit_code`."""

    exit_code = 1


class InputError(SojournError):
    """An option, argument or file of the user cannot be used."""

    exit_code = 2


class RunDataError(SojournError):
    """A run directory cannot be read, or lacks what is needed."""


class CalibrationError(SojournError):
    """A calibration of this machine is absent, unreadable, or does not cover the case."""


class ReplayError(SojournError):
    """A recorded run cannot be replayed, or not with this change."""


class ModelError(SojournError):
    """A checkpoint cannot be served, or not with these settings on this machine."""


class ServerError(SojournError):
    """A server cannot start, does not answer, or ended."""


class ExperimentError(SojournError):
    """A run, a search or a calibration cannot start or go on."""
