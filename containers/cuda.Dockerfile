# Heddle for NVIDIA GPUs, from this checkout with its own scripts. CUDA_IMAGE: an image of CUDA 13.0 with nvcc, of Debian 12 or
# Ubuntu 24.04 (not needed where dist/ has a wheel). The torch wheel brings the CUDA libraries of the final image; the host has the driver.
#
#     docker build -f containers/cuda.Dockerfile --build-arg CUDA_IMAGE=<CUDA 13.0 devel image of Ubuntu 24.04> -t heddle:cuda .
#     docker run --rm --gpus all --ipc host -v "$PWD:/work" heddle:cuda heddle sft run.yaml
#
# A wheel that `scripts/package cuda` left in dist/ (on Ubuntu 24.04 or older) is taken; without one the image's first stage makes it.
ARG CUDA_IMAGE=debian:12
FROM ${CUDA_IMAGE} AS build
COPY . /opt/heddle
WORKDIR /opt/heddle
RUN ls dist/heddle-*cu*.whl || { apt-get update -qq && scripts/package cuda; }

FROM ubuntu:24.04
COPY --from=build /opt/heddle/dist/heddle-*cu*.whl /tmp/
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates python3 python3-venv && \
    python3 -m venv /opt/heddle && /opt/heddle/bin/pip install --no-cache-dir /tmp/*.whl && \
    ln -s /opt/heddle/bin/heddle /usr/local/bin/heddle && rm -rf /tmp/*.whl /var/lib/apt/lists/*
WORKDIR /work
CMD ["heddle", "doctor"]
