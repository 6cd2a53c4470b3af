{{- define "encserve.name" -}}
{{- if contains "encserve" .Release.Name }}{{ .Release.Name | trunc 52 }}{{ else }}{{ .Release.Name | trunc 43 }}-encserve{{ end }}
{{- end }}

{{- define "encserve.selector" -}}
app.kubernetes.io/name: encserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "encserve.labels" -}}
{{ include "encserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: encserve
{{- end }}

{{- define "encserve.sharedVolume" -}}
{{- if or .Values.modelVolume.claim (eq .Values.modelVolume.accessMode "ReadWriteMany") }}yes{{ end }}
{{- end }}

{{- define "encserve.scaled" -}}
{{- if or .Values.autoscaling.enabled (kindIs "invalid" .Values.replicas) }}yes{{ end }}
{{- end }}

{{- define "encserve.check" -}}
{{- if and (or (include "encserve.scaled" .) (gt (int .Values.replicas) 1)) (not (include "encserve.sharedVolume" .)) }}
{{- fail "replicas, autoscaling: more than one server needs a volume that several pods can mount; set modelVolume.accessMode to ReadWriteMany, or name a claim in modelVolume.claim" }}
{{- end }}
{{- if and (gt (int .Values.gpus) 0) (ne .Values.engine "gpu") }}
{{- fail (printf "gpus is %d, but engine is %s; set engine to gpu" (int .Values.gpus) .Values.engine) }}
{{- end }}
{{- end }}

{{- define "encserve.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}

{{- define "encserve.probe" -}}
{{- if .root.Values.tls.secret -}}
httpGet: { scheme: HTTPS, port: metrics, path: /healthz }
{{- else -}}
grpc: { port: 50051{{ with .service }}, service: {{ . }}{{ end }} }
{{- end }}
{{- end }}

{{- define "encserve.saturation" -}}
{{- $of := printf "{namespace=\"%s\",pod=~\"%s-.+\"}" .Release.Namespace (include "encserve.name" .) -}}
max((avg_over_time(encserve_queue_tokens{{ $of }}[1m]) - avg_over_time(encserve_queue_bulk_tokens{{ $of }}[1m])) / encserve_queue_limit_tokens{{ $of }})
{{- end }}
