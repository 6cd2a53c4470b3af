# The server: docker build -f deploy/server.Dockerfile -t encserve-server:cpu .
# EXTRA is the engine: cpu (amd64 and arm64), openvino, or gpu (NVIDIA): --build-arg EXTRA=gpu -t encserve-server:gpu
# It serves the bundles of a volume: docker run -v models:/models -p 127.0.0.1:50051:50051 encserve-server:cpu --model NAME
# Ports: gRPC 50051, metrics 9464, and HTTP 8080 with --http-port=8080.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG EXTRA=cpu

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG EXTRA
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_NO_INDEX=
WORKDIR /build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/build/wheels/constraints.txt PIP_FIND_LINKS=/build/wheels
RUN python -m venv --without-pip /opt/encserve
COPY constraints.txt dist* wheels/
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip --python /opt/encserve/bin/python install --constraint wheels/constraints.txt --only-binary :all: \
        ".[${EXTRA},http,tls,tracing,pooling]"
# The code comes last: a change of it leaves the layers above as they are.
COPY proto proto
COPY export export
COPY server server
COPY clients clients
RUN pip --python /opt/encserve/bin/python install --force-reinstall --no-deps .

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS server-cpu
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="encserve-server" \
      org.opencontainers.image.description="Serves transformer encoders over gRPC and HTTP" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A new volume takes the owner and the mode of its folder.
RUN install --directory --owner=10001 --group=10001 /models && \
    install --directory --owner=10001 --group=10001 --mode=0700 /cache
COPY --from=build /opt/encserve /opt/encserve
ENV PATH=/opt/encserve/bin:${PATH} \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ENCSERVE_CACHE_DIR=/cache \
    ENCSERVE_HOST=0.0.0.0 \
    ENCSERVE_MODEL_REPOSITORY=/models
WORKDIR /models
USER 10001:10001
EXPOSE 50051 9464 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-m", "encserve_server.healthcheck"]
ENTRYPOINT ["encserve-server"]

FROM server-cpu AS server-openvino

# This image does not start unless CUDA really runs the models. CUDA's libraries are in the image. The host has the
# driver (for CUDA 13) and the NVIDIA Container Toolkit.
FROM server-cpu AS server-gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ENCSERVE_DEVICE=cuda

# hadolint ignore=DL3006
FROM server-${EXTRA}
