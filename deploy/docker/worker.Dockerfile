# The worker, with CPU or CUDA torch. Build from the root of the repository, as `make images` does.
#   TORCH_BUILD  cpu or cuda
#   TORCH_INDEX  where torch comes from; empty takes pip's own index
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
ARG TORCH_BUILD=cpu
ARG TORCH_INDEX=
# What Python compiles then carries a hash of its source instead of the hour of the build.
ENV SOURCE_DATE_EPOCH=315532800
WORKDIR /opt/quire
# g++ compiles the native CPU kernels, which are copied on; the compiler itself is not. Debian keeps
# one version of a package: a pinned one would be gone after its next update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY requirements.lock requirements-cuda.lock ./
# torch first, and the rest after a look at what came: an index that offers the other build would give
# an image that does not do what its name says. Read, not imported: a CUDA build does not import
# without CUDA's packages.
RUN python3 -m venv venv \
    && venv/bin/pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
        "$(grep '^torch==' requirements.lock)" \
    && venv/bin/python -c "import importlib.util, pathlib, runpy, sys; \
folder = pathlib.Path(importlib.util.find_spec('torch').origin).parent; \
found = 'cuda' if runpy.run_path(str(folder / 'version.py'))['cuda'] else 'cpu'; \
found == '${TORCH_BUILD}' or sys.exit(f'TORCH_INDEX gives the {found} build of torch')" \
    && venv/bin/pip install --no-cache-dir --no-deps -r requirements.lock \
    && if [ "${TORCH_BUILD}" = cuda ]; then \
        venv/bin/pip install --no-cache-dir --no-deps -r requirements-cuda.lock; \
    fi
COPY servicekit app/servicekit
COPY protos/gen app/protos/gen
COPY kernels app/kernels
COPY gpu_worker app/gpu_worker
WORKDIR /opt/quire/app
RUN ../venv/bin/python -m kernels.native.build \
    && ../venv/bin/python -m compileall -q . \
    && ../venv/bin/pip uninstall --yes --quiet pip

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="quire-worker" \
    org.opencontainers.image.description="Quire's worker: executes plans on one model" \
    org.opencontainers.image.version="0.1.0"
# Triton compiles a small launcher at run time: a C compiler and Python's headers belong here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && if ! test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; \
       then apt-get install --yes --no-install-recommends python3-dev; fi \
    && rm -rf /var/lib/apt/lists/*
COPY --from=builder /opt/quire /opt/quire
# HOME and Triton's cache stand on volumes that can be written; the root file system can't. Threads of
# torch that spin between operators would take the cores from the kernels' own.
ENV PATH=/opt/quire/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/quire/app:/opt/quire/app/protos/gen \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/cache/home \
    TRITON_CACHE_DIR=/cache/triton \
    OMP_WAIT_POLICY=PASSIVE \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/quire/app
USER 10001:10001
EXPOSE 9100 9300
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "gpu_worker"]
