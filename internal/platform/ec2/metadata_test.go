package ec2

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// TestMetadataEndpoint checks that the standard credential chain uses only the
// configured metadata service.
func TestMetadataEndpoint(t *testing.T) {
	const role = "/latest/meta-data/iam/security-credentials/"
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPut && r.URL.Path == "/latest/api/token":
			w.Header().Set("X-Aws-Ec2-Metadata-Token-Ttl-Seconds", "300")
			w.Write([]byte("token"))
		case r.Header.Get("X-Aws-Ec2-Metadata-Token") != "token":
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path == role:
			w.Write([]byte("lull-agent"))
		case r.URL.Path == role+"lull-agent":
			w.Write([]byte(`{"Code":"Success","Type":"AWS-HMAC","AccessKeyId":"ASIAHERE","SecretAccessKey":"s","Token":"t","Expiration":"` +
				time.Now().Add(time.Hour).UTC().Format(time.RFC3339) + `"}`))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(srv.Close)
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
		"AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_EC2_METADATA_DISABLED"} {
		t.Setenv(name, "")
	}
	for _, name := range []string{"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"} {
		t.Setenv(name, "/dev/null")
	}
	// Nothing listens at the address in the environment.
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
	cfg, err := (Access{MetadataEndpoint: srv.URL}).Load(t.Context(), "us-east-1")
	if err != nil {
		t.Fatal(err)
	}
	c, err := cfg.Credentials.Retrieve(t.Context())
	if err != nil || c.AccessKeyID != "ASIAHERE" {
		t.Errorf("%q, %v", c.AccessKeyID, err)
	}
}
