{{- define "rankscope.labels" -}}
app.kubernetes.io/name: rankscope
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "rankscope.selector" -}}
app.kubernetes.io/name: rankscope
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "rankscope.collector" -}}
{{ default (printf "https://%s-collector.%s.svc:8443" .Release.Name .Release.Namespace) .Values.agent.collector }}
{{- end }}
