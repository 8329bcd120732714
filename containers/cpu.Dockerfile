# Heddle for CPUs, built from this checkout with its own scripts.
#
#     docker build -f containers/cpu.Dockerfile -t heddle:cpu .
#     docker run --rm -v "$PWD:/work" heddle:cpu heddle sft run.yaml
FROM debian:12 AS build
COPY . /opt/heddle
WORKDIR /opt/heddle
RUN apt-get update -qq && scripts/setup && scripts/build cpu --target heddle && cmake --install build/cpu --prefix /opt/install --strip
# libtorch and the two libraries that it loads, where the program looks for them.
RUN mkdir -p /opt/install/lib/heddle/torch /opt/install/lib/heddle/nvidia/cu13 && \
    cp -r .deps/site/torch/lib /opt/install/lib/heddle/torch/ && cp -r .deps/site/nvidia/cu13/lib /opt/install/lib/heddle/nvidia/cu13/

FROM debian:12-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ca-certificates libstdc++6 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/install /usr/local
WORKDIR /work
CMD ["heddle", "doctor"]
