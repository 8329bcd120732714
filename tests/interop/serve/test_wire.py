"""The server's protobuf against Python's runtime with the SDK's own descriptor: requests mean the same, answers are the same bytes.

More messages: WIRE_MESSAGES=100000
"""
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

import numpy
import pytest
import tinker.proto.tinker_public_pb2 as pb

from serve.serving import HEDDLE
from serve.test_fields import FOLDER, VERSIONS

TOOL = os.environ.get("HEDDLE_WIRE_TOOL", str(pathlib.Path(HEDDLE).parents[2] / "tests/interop/serve/heddle_wire_tool"))
COUNT = int(os.environ.get("WIRE_MESSAGES", "2000"))


def run(mode, sent):
    return subprocess.run([TOOL, mode], input=sent, capture_output=True, check=True).stdout


def framed(messages):
    return b"".join(struct.pack("<I", len(each)) + each for each in messages)


def unframed(sent):
    messages = []
    while sent:
        size, = struct.unpack("<I", sent[:4])
        messages.append(sent[4:4 + size])
        sent = sent[4 + size:]
    return messages


def name(draw):
    return draw.choice(["", "a", "weights", "ünïcode", "x" * 300])


def random_bytes(draw, most=40):
    return draw.randbytes(draw.randrange(most))


def random_request(draw):
    message = pb.ForwardBackwardRequest(model_id=name(draw), seq_id=draw.choice([0, 1, 7, 2**31 - 1]), loss_fn=name(draw),
                                        forward_only=draw.random() < 0.5)
    for _ in range(draw.randrange(3)):
        message.loss_fn_config[name(draw)] = draw.choice([0.0, -1.5, 1e300])
    for _ in range(draw.randrange(3)):
        value = message.loss_fn_config_v2[name(draw)]
        if draw.random() < 0.5:
            value.number = 2.5
        else:
            value.text = name(draw)
    for _ in range(draw.randrange(4)):
        datum = message.data.add()
        for _ in range(draw.randrange(4)):
            chunk = datum.model_input.add()
            kind = draw.randrange(4)
            if kind == 0:
                chunk.encoded_text.tokens = struct.pack("<3i", 1, -2, 3)[:4 * draw.randrange(4)]
            elif kind == 1:
                chunk.image.data = random_bytes(draw)
            elif kind == 2:
                chunk.dmel.dmel = random_bytes(draw)
        for _ in range(draw.randrange(3)):
            tensor = datum.loss_fn_inputs[name(draw)]
            tensor.dtype = draw.randrange(5)
            tensor.shape.extend(draw.choices([0, 1, 5, 2**40, -1], k=draw.randrange(3)))
            if draw.random() < 0.3:
                tensor.sparse_csr.values = random_bytes(draw)
                tensor.sparse_csr.crow_indices = random_bytes(draw)
                tensor.sparse_csr.col_indices = random_bytes(draw)
            elif draw.random() < 0.9:
                tensor.dense = random_bytes(draw)
        span = datum.model_input_spans.add()
        span.sampled_tokens.sequence_id = name(draw)
    return message


def meaning(message):
    """What the server must read of it."""
    numbers, texts = dict(message.loss_fn_config), {}
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind == "number":
            numbers[key] = value.number
        elif kind == "text":
            texts[key] = value.text
    data = []
    for datum in message.data:
        chunks = []
        for chunk in datum.model_input:
            kind = chunk.WhichOneof("chunk")
            tokens = numpy.frombuffer(chunk.encoded_text.tokens, numpy.int32).tolist() if kind == "encoded_text" else []
            chunks.append({"kind": [None, "encoded_text", "image", "dmel"].index(kind), "tokens": tokens})
        inputs = {}
        for key, tensor in datum.loss_fn_inputs.items():
            sparse = tensor.HasField("sparse_csr")
            inputs[key] = {"sparse": sparse, "values": (tensor.sparse_csr.values if sparse else tensor.dense).hex(),
                           "crow": tensor.sparse_csr.crow_indices.hex(), "col": tensor.sparse_csr.col_indices.hex(),
                           "dtype": tensor.dtype, "shape": list(tensor.shape)}
        data.append({"chunks": chunks, "inputs": inputs})
    return {"model_id": message.model_id, "seq_id": message.seq_id, "loss_fn": message.loss_fn, "numbers": numbers, "texts": texts,
            "forward_only": message.forward_only, "data": data}


def test_requests_mean_what_python_means():
    draw = random.Random(1)
    messages = [random_request(draw) for _ in range(COUNT)]
    lines = run("decode", framed([each.SerializeToString() for each in messages])).decode().splitlines()
    assert len(lines) == COUNT
    for message, line in zip(messages, lines):
        assert json.loads(line) == meaning(message)


FILL = '''
import struct, sys, tinker.proto.tinker_public_pb2 as pb
def fill(message, choice):
    for field in message.DESCRIPTOR.fields:
        kinds = field.containing_oneof and [each.name for each in field.containing_oneof.fields]
        if kinds and kinds[choice % len(kinds)] != field.name: continue
        value = {field.TYPE_STRING: "a", field.TYPE_BYTES: b"four"}.get(field.type, 1)
        held = getattr(message, field.name)
        if field.message_type and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type: fill(held["a"], choice)
            else: held["a"] = 1
        elif hasattr(held, "append"): fill(held.add(), choice) if field.message_type else held.append(value)
        elif field.message_type: fill(held, choice)
        else: setattr(message, field.name, value)
for choice in range(6):
    message = pb.ForwardBackwardRequest()
    fill(message, choice)
    sent = message.SerializeToString()
    sys.stdout.buffer.write(struct.pack("<I", len(sent)) + sent)
'''


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_an_sdk_is_known(version):
    if version and not (pathlib.Path(FOLDER) / version / "tinker/proto").exists():
        pytest.skip("it sends JSON")
    path = {"PYTHONPATH": str(pathlib.Path(FOLDER) / version)} if version else {}
    sent = subprocess.run([sys.executable, "-c", FILL], check=True, capture_output=True, env=os.environ | path).stdout
    assert len(unframed(sent)) == 6
    assert b"refused" not in run("decode", sent)


def test_broken_requests_are_refused_or_read():
    draw = random.Random(2)
    broken = []
    for _ in range(COUNT):
        sent = bytearray(random_request(draw).SerializeToString())
        for _ in range(draw.randrange(1, 4)):
            if sent:
                sent[draw.randrange(len(sent))] = draw.randrange(256)
        broken.append(bytes(sent[:draw.randrange(len(sent) + 1)]))
    assert len(run("decode", framed(broken)).splitlines()) == COUNT


def floats(draw, count):
    return [float(numpy.float32(draw.uniform(-9, 0))) for _ in range(count)]


def random_topk(draw, message):
    k, length = draw.randrange(4), draw.randrange(4)
    ids, logprobs = [draw.randrange(2**31) for _ in range(k * length)], floats(draw, k * length)
    message.token_ids, message.logprobs = struct.pack(f"<{k * length}i", *ids), struct.pack(f"<{k * length}f", *logprobs)
    message.k, message.length = k, length
    return {"ids": ids, "logprobs": logprobs, "k": k, "length": length}


def random_tensor(draw, message):
    told = {"dtype": draw.randrange(5), "shape": draw.choices([0, 1, 2**40], k=draw.randrange(3)), "values": random_bytes(draw).hex()}
    message.dtype = told["dtype"]
    message.shape.extend(told["shape"])
    if draw.random() < 0.5:
        message.dense = bytes.fromhex(told["values"])
        return told
    told.update(crow=random_bytes(draw).hex(), col=random_bytes(draw).hex())
    message.sparse_csr.SetInParent()
    message.sparse_csr.values = bytes.fromhex(told["values"])
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = bytes.fromhex(told["crow"]), bytes.fromhex(told["col"])
    return told


def random_sample(draw):
    message, told = pb.SampleResponse(), {"sequences": [], "cached": draw.choice([0, 1, 300])}
    message.prompt_cache_hit_tokens = told["cached"]
    for _ in range(draw.randrange(3)):
        count = draw.randrange(5)
        tokens, logprobs, cut = [draw.randrange(2**31) for _ in range(count)], floats(draw, count), draw.random() < 0.5
        sequence = message.sequences.add(stop_reason=int(cut), tokens=struct.pack(f"<{count}i", *tokens),
                                         logprobs=struct.pack(f"<{count}f", *logprobs))
        told["sequences"].append({"is_cut": cut, "tokens": tokens, "logprobs": logprobs})
        if draw.random() < 0.5:
            sequence.topk_sampled_logprobs.SetInParent()
            told["sequences"][-1]["topk"] = random_topk(draw, sequence.topk_sampled_logprobs)
    if draw.random() < 0.5:
        told["prompt_logprobs"] = floats(draw, draw.randrange(5))
        message.prompt_logprobs = struct.pack(f"<{len(told['prompt_logprobs'])}f", *told["prompt_logprobs"])
    if draw.random() < 0.5:
        message.topk_prompt_logprobs.SetInParent()
        told["topk"] = random_topk(draw, message.topk_prompt_logprobs)
    if draw.random() < 0.5:
        told["targets"] = random_tensor(draw, message.target_prompt_logprobs)
    if draw.random() < 0.5:
        told["alternatives"] = {key: random_tensor(draw, getattr(message.prompt_alt_tokens, key)) for key in ("tokens", "logprobs")}
    return message, {"sample": told}


def random_output(draw):
    """Without names that begin another: Python's runtime sorts the longer one first, others the shorter."""
    kind = name(draw)
    message = pb.ForwardBackwardOutput(loss_fn_output_type=kind)
    told = {"type": kind, "records": [], "metrics": {}}
    for _ in range(draw.randrange(3)):
        record = message.loss_fn_outputs.add(type_tag=kind, num_datums=draw.choice([0, 1, 300]))
        told["records"].append({"num_datums": record.num_datums, "fields": {}})
        for key in draw.sample(["logprobs", "elementwise_loss", "ü", "kl"], draw.randrange(4)):
            data, offsets = random_bytes(draw), [draw.randrange(2**40) for _ in range(draw.randrange(4))]
            dtype, shape = draw.randrange(5), draw.choices([0, 1, 2**40], k=draw.randrange(3))
            record.fields[key].CopyFrom(pb.BatchedTensor(data=data, offsets=struct.pack(f"<{len(offsets)}q", *offsets), dtype=dtype,
                                                         trailing_shape=shape))
            told["records"][-1]["fields"][key] = {"data": data.hex(), "offsets": offsets, "dtype": dtype, "trailing_shape": shape}
    for key in draw.sample(["loss:sum", "a:mean", "a:max"], draw.randrange(3)):
        told["metrics"][key] = message.metrics[key] = draw.choice([0.0, 1.5, -1e-300])
    return message, {"output": told}


def test_answers_are_the_bytes_of_python():
    draw = random.Random(3)
    pairs = [draw.choice([random_sample, random_output])(draw) for _ in range(COUNT)]
    sent = run("encode", "".join(json.dumps(told) + "\n" for _, told in pairs).encode())
    answers = unframed(sent)
    assert len(answers) == COUNT
    for (message, told), answer in zip(pairs, answers):
        assert answer == message.SerializeToString(deterministic=True), told
