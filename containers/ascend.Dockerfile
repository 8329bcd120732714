# Heddle for Ascend A2 and A3. The versions are those of docs/ascend.md; a test compares them.
#
#     docker build -f containers/ascend.Dockerfile --build-arg CANN_IMAGE=<an image with CANN 9.1.0 for your chip> -t heddle-ascend .
#     docker run --rm --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#       -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro heddle-ascend heddle doctor
#
# CANN comes under its own licence: use an image of the vendor, of Ubuntu 22.04 or later with CANN in /usr/local/Ascend.
ARG CANN_IMAGE
FROM ${CANN_IMAGE} AS torch_npu
ARG TORCH_VERSION=2.11.0
ARG TORCH_NPU_BRANCH=v2.11.0
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends \
      ca-certificates cmake elfutils g++ git ninja-build patch python3-dev python3-pip && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir torch==${TORCH_VERSION} pyyaml setuptools wheel numpy
RUN git clone --depth 1 --recurse-submodules --shallow-submodules -b ${TORCH_NPU_BRANCH} \
      https://gitcode.com/Ascend/pytorch.git /opt/torch_npu
COPY scripts/build-torch-npu scripts/versions.sh /opt/heddle/scripts/
RUN . /usr/local/Ascend/ascend-toolkit/set_env.sh && /opt/heddle/scripts/build-torch-npu /opt/torch_npu

FROM ${CANN_IMAGE}
COPY --from=torch_npu /opt/torch_npu/libtorch_npu /opt/libtorch_npu
COPY . /opt/heddle
WORKDIR /opt/heddle
ENV HEDDLE_TORCH_NPU_DIR=/opt/libtorch_npu
RUN . /usr/local/Ascend/ascend-toolkit/set_env.sh && scripts/setup && cmake --preset npu && \
    cmake --build --preset npu --target heddle && cmake --install build/npu --prefix /usr/local
ENTRYPOINT ["bash", "-c", ". /usr/local/Ascend/ascend-toolkit/set_env.sh && exec \"$@\"", "--"]
CMD ["heddle", "doctor"]
