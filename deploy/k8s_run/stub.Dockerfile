# The worker of the tests, without torch and without a model: for runs that should not compute. No
# overlay names it. Built by deploy/k8s_run, from the root of the repository.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS builder
# What Python compiles then carries a hash of its source instead of the hour of the build.
ENV SOURCE_DATE_EPOCH=315532800
WORKDIR /opt/quire
COPY requirements-light.lock ./
RUN python3 -m venv venv \
    && venv/bin/pip install --no-cache-dir --no-deps -r requirements-light.lock
COPY servicekit app/servicekit
COPY protos/gen app/protos/gen
COPY gpu_worker app/gpu_worker
COPY tests/__init__.py app/tests/__init__.py
COPY tests/stub_worker app/tests/stub_worker
RUN venv/bin/python -m compileall -q app

FROM ${PYTHON_IMAGE}
COPY --from=builder /opt/quire /opt/quire
ENV PATH=/opt/quire/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/quire/app:/opt/quire/app/protos/gen \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/cache/home
WORKDIR /opt/quire/app
USER 10001:10001
EXPOSE 9100 9300
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "tests.stub_worker"]
