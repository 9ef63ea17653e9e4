"""Which clients there are: what each needs installed and which script tries it."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Kind(Enum):
    """What its environment is."""

    PYTHON = "python"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client. An extra one is only run when it is named or all are asked for."""

    name: str
    script: str
    kind: Kind = Kind.PYTHON
    size: str = "0.1 GB"
    timeout_s: float = 300.0
    extra: bool = False

    @property
    def pins(self) -> Path:
        """The file with the exact versions that are tried."""
        if self.kind is Kind.NODE:
            return HERE / "npm" / self.name / "package.json"
        return HERE / "requirements" / f"{self.name}.txt"


CLIENTS = (
    Client(name="openai", script="openai_python.py"),
    Client(name="openai-node", script="openai_node.mjs", kind=Kind.NODE),
    Client(name="ai-sdk", script="ai_sdk.mjs", kind=Kind.NODE),
    Client(name="litellm", script="litellm_client.py", size="0.4 GB"),
    Client(name="langchain", script="langchain_client.py"),
    Client(name="llm", script="llm_client.py"),
    Client(name="tritonclient", script="tritonclient_grpc.py"),
    Client(name="buf", script="buf_curl.py"),
    Client(name="lm-eval", script="lm_eval_client.py", size="0.9 GB", timeout_s=900),
    Client(name="schemathesis", script="schemathesis_client.py", timeout_s=5400),
    Client(name="evalscope", script="evalscope_perf.py", size="1.2 GB", timeout_s=900),
    # Needs torch; most indexes offer its CUDA build, of several GB (TORCH_INDEX names another).
    Client(name="guidellm", script="guidellm_run.py", size="1.5 GB", timeout_s=900, extra=True),
)
