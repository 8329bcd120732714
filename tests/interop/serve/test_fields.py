"""Every field that an SDK may send is in the server's table: the newest SDK here, older ones where HEDDLE_OLD_SDKS names their folder."""
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys

import pytest

from serve.serving import ROOT

FOLDER = os.environ.get("HEDDLE_OLD_SDKS")
VERSIONS = [None] + (sorted(os.listdir(FOLDER)) if FOLDER else [])
TABLES = {  # requests of the SDK, and what the server calls their fields
    "CreateSessionRequest": "kCreateSession", "SessionHeartbeatRequest": "kHeartbeat", "SessionSearchRequest": "kSearchSessions",
    "FutureRetrieveRequest": "kRetrieveFuture", "FuturesRetrieveRequest": "kRetrieveFutures",
    "SamplingSessionFuturesTarget": "kFuturesTarget", "CreateModelRequest": "kCreateModel", "LoraConfig": "kLoraConfig",
    "AdamOptimizerConfig": "kOptimizerConfig", "DimuonOptimizerConfig": "kOptimizerConfig", "GetInfoRequest": "kRun",
    "UnloadModelRequest": "kRun", "ForwardRequest": "kForward", "ForwardBackwardRequest": "kForwardBackward",
    "ForwardBackwardInput": "kLossInput", "Datum": "kDatum", "ModelInput": "kModelInput", "EncodedTextChunk": "kTextChunk",
    "_TensorDataModel": "kTensor", "OptimStepRequest": "kOptimStep", "AdamParams": "kAdamParams", "SaveWeightsRequest": "kSaveWeights",
    "SaveWeightsForSamplerRequest": "kSaveWeightsForSampler", "SaveWeightsExternalRequest": "kSaveWeightsExternal",
    "LoadWeightsRequest": "kLoadWeights", "CopyWeightsRequest": "kCopyWeights", "CreateSamplingSessionRequest": "kCreateSamplingSession",
    "JoinSamplingSessionRequest": "kJoinSamplingSession", "SampleRequest": "kSample", "SamplingParams": "kSamplingParams",
}
ELSEWHERE = {  # requests whose fields the server does not look at, or does not build
    "ClientConfigRequest", "TelemetrySendRequest", "CreateCustomLossRequest", "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
}
# optim_params is written as one of the two.
ON_THE_WIRE = {"optim_params": "adam_params"}
LIST = """
import dataclasses, importlib, pkgutil, pydantic, tinker.types as types
for info in pkgutil.walk_packages(types.__path__, types.__name__ + "."):
    for name, kind in vars(importlib.import_module(info.name)).items():
        if not isinstance(kind, type) or not kind.__module__.startswith("tinker"): continue
        if dataclasses.is_dataclass(kind): print(name, *[field.name for field in dataclasses.fields(kind) if field.name[0] != "_"])
        elif issubclass(kind, pydantic.BaseModel): print(name, *[field.alias or key for key, field in kind.model_fields.items()])
"""


def told(version):
    if version is None:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(LIST, {})
        return out.getvalue()
    return subprocess.run([sys.executable, "-c", LIST], check=True, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(pathlib.Path(FOLDER) / version)}).stdout


def known():
    text = (ROOT / "src/serve/tinker/known_fields.h").read_text()
    return {name: set(" ".join(re.findall(r'"([^"]*)"', body)).split())
            for name, body in re.findall(r"constexpr Known (k\w+)\{(.*?)\};", text, re.DOTALL)}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_has_what_clients_send(version):
    sent = {name: {ON_THE_WIRE.get(field, field) for field in fields} for name, *fields in map(str.split, told(version).splitlines())}
    requests = {name for name in sent if name.endswith("Request")}
    assert len(requests) > 10 and requests <= set(TABLES) | ELSEWHERE, requests
    table = known()
    for name, fields in sent.items():
        if name in TABLES:
            assert fields <= table[TABLES[name]], (name, fields - table[TABLES[name]])
