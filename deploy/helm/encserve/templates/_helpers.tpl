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

{{- define "encserve.ownNode" -}}
{{- if eq .Values.modelVolume.accessMode "ReadWriteOnce" }}modelVolume
{{- else if and .Values.cacheVolume.claim (eq .Values.cacheVolume.accessMode "ReadWriteOnce") }}cacheVolume
{{- end }}
{{- end }}

{{- define "encserve.scaled" -}}
{{- if or .Values.autoscaling.enabled (kindIs "invalid" .Values.replicas) }}yes{{ end }}
{{- end }}

{{- define "encserve.check" -}}
{{- if or (include "encserve.scaled" .) (gt (int .Values.replicas) 1) }}
{{- with include "encserve.ownNode" . }}
{{- fail (printf "replicas, autoscaling: more than one server needs volumes that several nodes can mount; set %s.accessMode to ReadWriteMany" .) }}
{{- end }}
{{- end }}
{{- $owned := dict "engine" "use the value engine" "callers" "use the value callers.secret" }}
{{- $_ := set $owned "tls-client-ca-file" "use the value tls.clientCa" }}
{{- range list "tls-cert-file" "tls-key-file" }}{{ $_ := set $owned . "use the value tls.secret" }}{{ end }}
{{- range list "model-repository" "cache-dir" "host" "grpc-port" "http-port" "metrics-port" }}
{{- $_ := set $owned . "remove the setting" }}
{{- end }}
{{- range $flag, $advice := $owned }}
{{- if hasKey $.Values.settings $flag }}
{{- fail (printf "settings.%s: the chart sets this flag; %s" $flag $advice) }}
{{- end }}
{{- end }}
{{- if and (gt (int .Values.gpus) 0) (ne .Values.engine "gpu") }}
{{- fail (printf "gpus is %d, but engine is %s; set engine to gpu" (int .Values.gpus) .Values.engine) }}
{{- end }}
{{- end }}

{{- define "encserve.settings" -}}
{{- $settings := deepCopy .Values.settings }}
{{- /* `merge` would replace a setting that is 0. */}}
{{- range $flag, $value := dict "drain-delay-seconds" 5 "grace-seconds" 25 "max-connection-age-seconds" 300 }}
{{- if not (hasKey $settings $flag) }}{{ $_ := set $settings $flag $value }}{{ end }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{- define "encserve.flags" -}}
{{- range $flag, $value := include "encserve.settings" . | fromJson }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else }}
{{- range kindIs "slice" $value | ternary $value (list $value) }}
{{- /* All numbers are float64 here, and a float64 of a million prints as 1e+06. */}}
{{- $whole := and (kindIs "float64" .) (eq (toString .) (toString (float64 (int64 .)))) }}
- {{ printf "--%s=%v" $flag (ternary (int64 .) . $whole) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "encserve.stopSeconds" -}}
{{- $settings := include "encserve.settings" . | fromJson -}}
{{- addf (index $settings "drain-delay-seconds") (index $settings "grace-seconds") 15 | ceil | int64 }}
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
{{- $of := printf "{namespace=\"%s\",pod=~\"%s-[0-9a-z]+(-[0-9a-z]+)?\"}" .Release.Namespace (include "encserve.name" .) -}}
max((avg_over_time(encserve_queue_tokens{{ $of }}[1m]) - avg_over_time(encserve_queue_bulk_tokens{{ $of }}[1m])) / encserve_queue_limit_tokens{{ $of }})
{{- end }}
