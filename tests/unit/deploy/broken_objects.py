"""What may be wrong between objects, with the check that must find it and what it must say."""

from deploy.k8s_check import monitoring_checks, network_checks, object_checks, schema_checks
from tests.unit.deploy.manifests import Change, Check, container, get, pod, rule, setting, trigger

BROKEN: list[tuple[Check, Change, str]] = [
    # fields and types
    (
        schema_checks.objects_fit_their_schemas,
        lambda r: container(r, "gateway").update(livenessprobe={}),
        "livenessprobe",
    ),
    (
        schema_checks.objects_fit_their_schemas,
        lambda r: get(r, "Service", "gateway").update(apiVersion="v2"),
        "no Service in v2",
    ),
    (
        schema_checks.objects_fit_their_schemas,
        lambda r: get(r, "ScaledObject", "worker")["spec"].update(minReplicas=0),
        "minReplicas",
    ),
    (
        schema_checks.objects_fit_their_schemas,
        lambda r: get(r, "PodMonitor", "quire")["spec"]["podMetricsEndpoints"][0].pop("port"),
        "'port' is a required property",
    ),
    (
        schema_checks.objects_fit_their_schemas,
        lambda r: rule(r, "QuireNoLeader").update({"for": "soon"}),
        "does not match",
    ),
    # between objects
    (
        object_checks.references_resolve,
        lambda r: container(r, "worker")["envFrom"][0]["configMapRef"].update(name="quires"),
        "no ConfigMap quires",
    ),
    (
        object_checks.references_resolve,
        lambda r: container(r, "gateway")["env"][0]["valueFrom"]["secretKeyRef"].update(key="root"),
        "nobody makes key root",
    ),
    (
        object_checks.references_resolve,
        lambda r: pod(r, "scheduler").update(serviceAccountName="default"),
        "no ServiceAccount default",
    ),
    (
        object_checks.references_resolve,
        lambda r: container(r, "worker")["volumeMounts"][0].update(name="caches"),
        "mounts caches",
    ),
    (
        object_checks.references_resolve,
        lambda r: pod(r, "gateway")["volumes"].append(
            {"name": "x", "secret": {"secretName": "keys"}}
        ),
        "nobody makes the Secret keys",
    ),
    (
        object_checks.selectors_take_their_own,
        lambda r: get(r, "Service", "gateway")["spec"].update(
            selector={"app.kubernetes.io/part-of": "quire"}
        ),
        "Service gateway: takes",
    ),
    (
        object_checks.selectors_take_their_own,
        lambda r: get(r, "Service", "gateway")["spec"]["ports"][0].update(targetPort="rest"),
        "has no port rest",
    ),
    (
        object_checks.selectors_take_their_own,
        lambda r: get(r, "Service", "redis")["spec"]["ports"][0].update(port=6380),
        "port 6380 leads to 6379",
    ),
    (
        object_checks.selectors_take_their_own,
        lambda r: get(r, "Deployment", "worker")["spec"]["template"]["metadata"]["labels"].update(
            {"app.kubernetes.io/component": "gpu"}
        ),
        "Deployment worker: its selector takes []",
    ),
    (
        object_checks.selectors_take_their_own,
        lambda r: pod(r, "gateway")["topologySpreadConstraints"][0]["labelSelector"].update(
            matchLabels={"app.kubernetes.io/part-of": "quire"}
        ),
        "its spread counts",
    ),
    (
        object_checks.selectors_take_their_own,
        lambda r: get(r, "PodDisruptionBudget", "worker")["spec"].update(
            selector={"matchLabels": {"app.kubernetes.io/component": "workers"}}
        ),
        "PodDisruptionBudget worker: takes []",
    ),
    (
        object_checks.one_owner_of_replicas,
        lambda r: get(r, "Deployment", "gateway")["spec"].update(replicas=2),
        "replicas is set, HorizontalPodAutoscaler gateway owns it",
    ),
    (
        object_checks.one_owner_of_replicas,
        lambda r: get(r, "Deployment", "scheduler")["spec"].pop("replicas"),
        "neither replicas nor an autoscaler",
    ),
    (
        object_checks.one_owner_of_replicas,
        lambda r: get(r, "ScaledObject", "worker")["spec"]["scaleTargetRef"].update(name="w"),
        "no Deployment w",
    ),
    (
        object_checks.updates_spare_devices,
        lambda r: get(r, "Deployment", "worker")["spec"]["strategy"]["rollingUpdate"].update(
            maxSurge=1
        ),
        "maxSurge, maxUnavailable must be (0, 1)",
    ),
    (
        object_checks.updates_spare_devices,
        lambda r: get(r, "PodDisruptionBudget", "scheduler")["spec"].pop(
            "unhealthyPodEvictionPolicy"
        ),
        "PodDisruptionBudget scheduler: unhealthyPodEvictionPolicy must be AlwaysAllow",
    ),
    (
        object_checks.spreads_count_usable_nodes,
        lambda r: pod(r, "scheduler")["topologySpreadConstraints"][0].pop("nodeTaintsPolicy"),
        "Deployment scheduler: its spread counts nodes with taints",
    ),
    (
        object_checks.lone_workers_are_waited_for,
        lambda r: setting(r, "QUIRE_WORKER_WAIT_S", "30"),
        "Deployment worker: may be alone, and requests wait 30 s",
    ),
    (
        object_checks.lone_workers_are_waited_for,
        lambda r: setting(r, "QUIRE_DEFAULT_DEADLINE_S", "600"),
        "requests live 600 s, and wait 600",
    ),
    (
        object_checks.from_zero_waits_for_a_worker,
        lambda r: get(r, "ScaledObject", "worker")["spec"].update(minReplicaCount=0),
        "requests wait 600",
    ),
    (
        object_checks.everything_is_labelled,
        lambda r: get(r, "Deployment", "gateway")["spec"]["template"]["metadata"]["labels"].pop(
            "app.kubernetes.io/instance"
        ),
        "no label app.kubernetes.io/instance",
    ),
    # the network
    (
        network_checks.policies_are_the_table,
        lambda r: get(r, "NetworkPolicy", "worker")["spec"]["ingress"][0]["from"].pop(),
        "in the table and not allowed: scheduler to worker:9300",
    ),
    (
        network_checks.policies_are_the_table,
        lambda r: get(r, "NetworkPolicy", "metrics")["spec"]["ingress"][0].pop("from"),
        "allowed and not in the table: anywhere to worker:9100",
    ),
    (
        network_checks.policies_are_the_table,
        lambda r: get(r, "NetworkPolicy", "to-redis")["spec"]["egress"][0].pop("ports"),
        "gateway may go to redis:0, which refuses it",
    ),
    (
        network_checks.policies_are_the_table,
        lambda r: get(r, "NetworkPolicy", "to-workers")["spec"]["egress"][0]["ports"][0].update(
            port="work"
        ),
        "not allowed: gateway to worker:9300",
    ),
    (
        network_checks.policies_are_the_table,
        lambda r: get(r, "NetworkPolicy", "default-deny")["spec"].update(policyTypes=["Egress"]),
        "not everything is denied by default",
    ),
    (
        network_checks.denied_pods_have_their_model,
        lambda r: setting(r, "QUIRE_MODEL", "some/model"),
        "can't reach the hub",
    ),
    # queries
    (
        monitoring_checks.queries_ask_for_what_there_is,
        lambda r: rule(r, "QuireCacheFull").update(expr="max(vllm:gpu_cache_usage_perc) > 1"),
        "nothing exports vllm:gpu_cache_usage_perc",
    ),
    (
        monitoring_checks.queries_ask_for_what_there_is,
        lambda r: rule(r, "QuireCacheFull").update(expr="rate(vllm:num_preemptions[5m]) > 1"),
        "nothing exports vllm:num_preemptions",
    ),
    (
        monitoring_checks.queries_ask_for_what_there_is,
        lambda r: rule(r, "QuireCacheFull").update(expr='quire:epoch{modell="x"} > 1'),
        "no series has the label modell",
    ),
    (
        monitoring_checks.queries_ask_for_what_there_is,
        lambda r: rule(r, "QuireCacheFull").update(expr="sum by (model) (quire:epoch) > 1"),
        "no series has the label model",
    ),
    (
        monitoring_checks.queries_ask_for_what_there_is,
        lambda r: rule(r, "QuireCacheFull").update(expr="sum(quire:epoch"),
        "does not parse",
    ),
    (
        monitoring_checks.queries_ask_for_what_there_is,
        lambda r: get(r, "ScaledObject", "worker")["spec"]["triggers"][1]["metadata"].update(
            query="sum(quire:backlog)"
        ),
        "nothing exports quire:backlog",
    ),
    (
        monitoring_checks.queries_ask_for_what_there_is,
        lambda r: get(r, "ConfigMap", "quire-dashboard")["data"].update(
            {
                "quire.json": get(r, "ConfigMap", "quire-dashboard")["data"]["quire.json"].replace(
                    "quire:plan_bytes_bucket", "quire:plan_size_bucket"
                )
            }
        ),
        "nothing exports quire:plan_size_bucket",
    ),
    (
        monitoring_checks.scalers_ask_for_their_model,
        lambda r: setting(r, "QUIRE_SERVED_MODEL_NAME", "another"),
        "serves {'another'}",
    ),
    (
        monitoring_checks.scalers_ask_for_their_model,
        lambda r: get(r, "ScaledObject", "worker")["metadata"].update(namespace="staging"),
        "time-to-drain: asks in {'quire'}",
    ),
    (
        monitoring_checks.scalers_ask_for_their_model,
        lambda r: trigger(r, 1).update(
            query='sum(quire:backlog_tokens{model_name="qwen2.5-7b-instruct"})'
        ),
        "queued-tokens: asks in every namespace",
    ),
    (
        monitoring_checks.scalers_have_both_signals,
        lambda r: trigger(r, 1).update(ignoreNullValues="true"),
        "queued-tokens: ignoreNullValues must be false",
    ),
    (
        monitoring_checks.scalers_have_both_signals,
        lambda r: trigger(r, 1).pop("ignoreNullValues"),
        "queued-tokens: ignoreNullValues must be false",
    ),
    (
        monitoring_checks.scalers_have_both_signals,
        lambda r: trigger(r, 0).update(ignoreNullValues="false"),
        "time-to-drain: ignoreNullValues must be true",
    ),
    (
        monitoring_checks.scalers_have_both_signals,
        lambda r: get(r, "ScaledObject", "worker")["spec"]["triggers"].pop(0),
        "no trigger asks for quire:time_to_drain_seconds",
    ),
    (
        monitoring_checks.scalers_have_both_signals,
        lambda r: get(r, "ScaledObject", "worker")["spec"]["triggers"].pop(),
        "no trigger asks for quire:backlog_tokens alone",
    ),
    (
        monitoring_checks.alerts_are_explained,
        lambda r: rule(r, "QuireNoLeader").update(alert="QuireHeadless"),
        "alert QuireHeadless: no section",
    ),
    (
        monitoring_checks.alerts_are_explained,
        lambda r: rule(r, "QuireNoLeader")["annotations"].update(runbook="docs/elsewhere.md"),
        "its runbook must be",
    ),
    (
        monitoring_checks.alerts_are_explained,
        lambda r: rule(r, "QuireNoLeader")["labels"].update(severity="page"),
        "no severity",
    ),
    (
        monitoring_checks.monitors_scrape_the_ops_port,
        lambda r: get(r, "PodMonitor", "quire")["spec"]["podMetricsEndpoints"][0].update(port="x"),
        "has no port x",
    ),
    (
        monitoring_checks.monitors_scrape_the_ops_port,
        lambda r: get(r, "PodMonitor", "quire")["spec"]["podMetricsEndpoints"][0].update(path="/m"),
        "nothing serves /m",
    ),
    (
        monitoring_checks.monitors_scrape_the_ops_port,
        lambda r: get(r, "PodMonitor", "quire")["spec"]["selector"]["matchExpressions"][1].update(
            values=["gateway", "worker"]
        ),
        "PodMonitor quire: takes",
    ),
]
