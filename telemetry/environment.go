package telemetry

import (
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
)

// sdkDisabled reads OpenTelemetry's switch for all signals.
func sdkDisabled() bool { return strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") }

// tracingWanted reports whether the environment asks for spans. Unlike the SDK, which would send them to localhost, it takes the
// absence of an endpoint for a no.
func tracingWanted(log *slog.Logger) (bool, error) {
	variable := "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	if !isSet(variable) {
		variable = "OTEL_EXPORTER_OTLP_ENDPOINT"
	}
	if !isSet(variable) || sdkDisabled() {
		return false, nil
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
			return false, nil
		}
	}
	// The SDK would log the error and use localhost.
	if _, err := url.Parse(strings.TrimSpace(os.Getenv(variable))); err != nil {
		return false, fmt.Errorf("%s must be a URL such as http://localhost:4317: %w", variable, err)
	}
	for _, variable := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if protocol := os.Getenv(variable); protocol != "" {
			if protocol != "grpc" {
				log.Warn("spans are exported over gRPC alone", variable, protocol)
			}
			break
		}
	}
	return true, nil
}
