package telemetry

import (
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"strings"
)

// sdkDisabled reads OpenTelemetry's switch for all signals.
func sdkDisabled() bool { return strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") }

// tracesEndpoint is where the environment wants spans, nil for nowhere. Unlike the SDK, which would send them to localhost, it takes
// the absence of an endpoint for a no.
func tracesEndpoint(log *slog.Logger) (*url.URL, error) {
	variable := "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	if !isSet(variable) {
		variable = "OTEL_EXPORTER_OTLP_ENDPOINT"
	}
	if !isSet(variable) || sdkDisabled() {
		return nil, nil
	}
	if exporters := os.Getenv("OTEL_TRACES_EXPORTER"); exporters != "" {
		wanted := false
		for name := range strings.SplitSeq(exporters, ",") {
			switch name = strings.TrimSpace(name); name {
			case "otlp":
				wanted = true
			case "none":
			default:
				log.Warn("OTEL_TRACES_EXPORTER names an exporter that is not here", "exporter", name)
			}
		}
		if !wanted {
			return nil, nil
		}
	}
	// The SDK would log the error and use localhost.
	endpoint, err := url.Parse(strings.TrimSpace(os.Getenv(variable)))
	if err != nil {
		return nil, fmt.Errorf("%s must be a URL such as http://localhost:4317: %w", variable, err)
	}
	for _, variable := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if protocol := os.Getenv(variable); protocol != "" {
			if protocol != "grpc" {
				log.Warn("spans are exported over gRPC alone", variable, protocol)
			}
			break
		}
	}
	warnOfSampler(log)
	return endpoint, nil
}

// warnOfSampler logs what the SDK would only tell its global handler, which writes plain text.
func warnOfSampler(log *slog.Logger) {
	sampler := strings.ToLower(strings.TrimSpace(os.Getenv("OTEL_TRACES_SAMPLER")))
	argument := strings.TrimSpace(os.Getenv("OTEL_TRACES_SAMPLER_ARG"))
	switch sampler {
	case "", "always_on", "always_off", "parentbased_always_on", "parentbased_always_off":
	case "traceidratio", "parentbased_traceidratio":
		if ratio, err := strconv.ParseFloat(argument, 64); argument != "" && (err != nil || !(ratio >= 0 && ratio <= 1)) {
			log.Warn("OTEL_TRACES_SAMPLER_ARG is no number from 0 to 1, and 1 is used", "argument", argument)
		}
	default:
		log.Warn("OTEL_TRACES_SAMPLER names a sampler that is not here, and parentbased_always_on is used", "sampler", sampler)
	}
}

// transport is how spans travel to an endpoint, as the exporter decides it.
func transport(endpoint *url.URL) string {
	const prefix = "OTEL_EXPORTER_OTLP_"
	for _, name := range []string{"CERTIFICATE", "TRACES_CERTIFICATE", "CLIENT_CERTIFICATE", "TRACES_CLIENT_CERTIFICATE"} {
		if isSet(prefix + name) {
			return "TLS"
		}
	}
	plaintext := endpoint.Scheme == "http" || endpoint.Scheme == "unix"
	for _, name := range []string{"INSECURE", "TRACES_INSECURE"} {
		if isSet(prefix + name) {
			plaintext = strings.EqualFold(strings.TrimSpace(os.Getenv(prefix+name)), "true")
		}
	}
	if plaintext {
		return "plaintext"
	}
	return "TLS"
}
