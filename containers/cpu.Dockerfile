# Heddle for CPUs, from this checkout with its own scripts.
#
#     docker build -f containers/cpu.Dockerfile -t heddle:cpu .
#     docker run --rm -v "$PWD:/work" heddle:cpu heddle sft run.yaml
#
# A tarball that `scripts/package cpu` left in dist/ (on Debian 12 or older) is taken; without one the image's first stage makes it,
# which takes about half an hour on a few cores.
FROM debian:12 AS build
COPY . /opt/heddle
WORKDIR /opt/heddle
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-pip xz-utils && \
    { ls dist/heddle-*-linux-*.tar.xz || scripts/package cpu; } && scripts/setup --run && \
    mkdir /opt/install && tar -C /opt/install --strip-components=1 -xf dist/heddle-*-linux-*.tar.xz
# libtorch with the two libraries that it loads, and Arrow, where the program looks for them.
RUN mkdir -p /opt/install/lib/heddle/torch /opt/install/lib/heddle/nvidia/cu13 && \
    cp -r .deps/site/torch/lib /opt/install/lib/heddle/torch/ && cp -r .deps/site/nvidia/cu13/lib /opt/install/lib/heddle/nvidia/cu13/ && \
    cp .deps/site/pyarrow/lib*.so.* /opt/install/lib/heddle/

FROM debian:12-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates libstdc++6 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/install /usr/local
WORKDIR /work
CMD ["heddle", "doctor"]
