# The scheduler: no torch. Build from the root of the repository, as `make images` does.
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
COPY scheduler_svc app/scheduler_svc
# The root file system is read-only at run time, so what is compiled is compiled here.
RUN venv/bin/python -m compileall -q app \
    && venv/bin/pip uninstall --yes --quiet pip setuptools

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="quire-scheduler" \
    org.opencontainers.image.description="Quire's scheduler: decides every step of every worker" \
    org.opencontainers.image.version="0.1.0"
COPY --from=builder /opt/quire /opt/quire
ENV PATH=/opt/quire/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/quire/app:/opt/quire/app/protos/gen \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
WORKDIR /opt/quire/app
USER 10001:10001
EXPOSE 9100 9200
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "scheduler_svc"]
