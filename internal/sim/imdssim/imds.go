// Package imdssim implements IMDSv2 (and, if an instance allows it, IMDSv1) for the
// instances of a simulated world.
//
// One handler serves every instance. A request is for the instance whose metadata
// address was dialed (see world.Instance.MetadataAddr), otherwise for the one that
// the Host header names by any address or name, and otherwise for the handler's
// Default. AWS_EC2_METADATA_SERVICE_ENDPOINT directs an SDK to the handler.
//
// Hop limits are simulated: clients are Hops network hops away, and an instance with
// a lower limit never answers the token request, as if the packet had been dropped.
// 401, 403, 503 and hanging responses are faults of the service "imds", whose actions
// are "PUT token" and "GET " with the path below /latest/.
package imdssim

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"lull/internal/sim/fault"
	"lull/internal/sim/world"
)

// IMDS serves the metadata of instances.
type IMDS struct {
	// Default is the ID, name or address of the instance that answers requests that
	// do not identify one. If empty, such requests fail.
	Default string
	// Hops is how many hops away clients are; 0 means 1, the instance itself.
	Hops int

	w *world.World
}

// New returns a handler for the instances of a world.
func New(w *world.World) *IMDS { return &IMDS{w: w} }

// maxTTL is the longest lifetime of a token, in seconds.
const maxTTL = 21600

type token struct {
	ID    string `json:"i"`
	Until int64  `json:"u"`
}

// ServeHTTP answers one request.
func (h *IMDS) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	i, now, ok := h.instance(r)
	if !ok || i.State != world.Running {
		panic(http.ErrAbortHandler) // no instance to answer for
	}
	path := strings.TrimPrefix(r.URL.Path, "/latest/")
	action := r.Method + " " + strings.TrimPrefix(path, "api/")
	h.w.Calls.Count("imds", action)
	e := h.w.Faults.Pick(now.Wire, fault.Call{Service: "imds", Action: action, Region: i.Region, Targets: []string{i.ID, i.Name}})
	e.Serve(w, r, func(w http.ResponseWriter, rule fault.Rule) {
		status := rule.Status
		if status == 0 {
			status = http.StatusServiceUnavailable
		}
		plain(w, status, http.StatusText(status))
	}, func(w http.ResponseWriter) {
		w.Header().Set("Server", "EC2ws")
		w.Header().Set("Date", now.Wire.UTC().Format(http.TimeFormat))
		switch {
		case path == "api/token":
			h.giveToken(w, r, i, now)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			plain(w, http.StatusMethodNotAllowed, "Method Not Allowed")
		case !admitted(r, i, now):
			plain(w, http.StatusUnauthorized, "Unauthorized")
		default:
			h.get(w, path, i, now)
		}
	})
}

// instance returns a copy of the instance that a request is for. What the copy shares
// with the original is never changed in place.
func (h *IMDS) instance(r *http.Request) (i world.Instance, at world.Moment, ok bool) {
	refs := []string{hostname(r.Host), h.Default}
	if a, isTCP := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); isTCP {
		refs = []string{a.IP.String(), hostname(r.Host), h.Default}
	}
	for _, ref := range refs {
		if ref != "" && h.w.Locate(ref, func(x *world.Instance, now world.Moment) { i, at = *x, now }) {
			return i, at, true
		}
	}
	return i, at, false
}

func hostname(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return hostport
}

func (h *IMDS) giveToken(w http.ResponseWriter, r *http.Request, i world.Instance, now world.Moment) {
	ttl, err := strconv.Atoi(r.Header.Get("X-aws-ec2-metadata-token-ttl-seconds"))
	switch {
	case r.Method != http.MethodPut:
		plain(w, http.StatusMethodNotAllowed, "Method Not Allowed")
		return
	case r.Header.Get("X-Forwarded-For") != "":
		plain(w, http.StatusForbidden, "Forbidden")
		return
	case err != nil || ttl < 1 || ttl > maxTTL:
		plain(w, http.StatusBadRequest, "Bad Request")
		return
	case max(h.Hops, 1) > i.HopLimit:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	}
	b, err := json.Marshal(token{ID: i.ID, Until: now.Wire.Add(time.Duration(ttl) * time.Second).UnixMilli()})
	if err != nil {
		plain(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("X-aws-ec2-metadata-token-ttl-seconds", strconv.Itoa(ttl))
	plain(w, http.StatusOK, base64.URLEncoding.EncodeToString(b))
}

// admitted reports whether a request's token is valid or, if it has none, the
// instance allows IMDSv1.
func admitted(r *http.Request, i world.Instance, now world.Moment) bool {
	text := r.Header.Get("X-aws-ec2-metadata-token")
	if text == "" {
		return !i.TokensRequired
	}
	b, err := base64.URLEncoding.DecodeString(text)
	var t token
	return err == nil && json.Unmarshal(b, &t) == nil && t.ID == i.ID && now.Wire.UnixMilli() < t.Until
}

func plain(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "text/plain")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body)) // the client may have disconnected
}

func (h *IMDS) get(w http.ResponseWriter, path string, i world.Instance, now world.Moment) {
	switch path {
	case "user-data":
		if len(i.UserData) == 0 {
			plain(w, http.StatusNotFound, "Not Found")
			return
		}
		plain(w, http.StatusOK, string(i.UserData))
		return
	case "dynamic/instance-identity/document":
		writeJSON(w, identity(i))
		return
	}
	rest, ok := strings.CutPrefix(path, "meta-data")
	if !ok {
		plain(w, http.StatusNotFound, "Not Found")
		return
	}
	rest = strings.Trim(rest, "/")
	if v, ok := values(i, now)[rest]; ok {
		plain(w, http.StatusOK, v)
		return
	}
	if i.Profile != "" && (rest == "iam/info" || rest == "iam/security-credentials/"+i.Profile) {
		writeJSON(w, credentials(i, now, rest == "iam/info"))
		return
	}
	if list := below(i, now, rest); len(list) > 0 {
		plain(w, http.StatusOK, strings.Join(list, "\n"))
		return
	}
	plain(w, http.StatusNotFound, "Not Found")
}

// values returns the metadata that are plain texts, by path.
func values(i world.Instance, now world.Moment) map[string]string {
	m := map[string]string{
		"instance-id": i.ID, "ami-id": i.Image, "instance-type": i.Type, "reservation-id": i.Reservation,
		"ami-launch-index": strconv.Itoa(i.LaunchIndex), "local-ipv4": i.PrivateIP.String(),
		"placement/region": i.Region, "placement/availability-zone": i.Zone,
		"instance-life-cycle": "on-demand", "security-groups": strings.Join(i.Groups, "\n"),
		"hostname":       "ip-" + strings.ReplaceAll(i.PrivateIP.String(), ".", "-") + ".ec2.internal",
		"local-hostname": "ip-" + strings.ReplaceAll(i.PrivateIP.String(), ".", "-") + ".ec2.internal",
	}
	if i.Spot {
		m["instance-life-cycle"] = "spot"
	}
	if i.PublicIP.IsValid() {
		m["public-ipv4"] = i.PublicIP.String()
	}
	if !i.SpotAt.IsZero() {
		at := i.SpotAt.UTC().Format(time.RFC3339)
		m["spot/instance-action"] = fmt.Sprintf(`{"action": "stop", "time": "%s"}`, at)
		m["spot/termination-time"] = at
	}
	if i.TagsInMetadata {
		for _, t := range i.TagsAt(now.Wire) {
			if listable(t.Key) {
				m["tags/instance/"+t.Key] = t.Value
			}
		}
	}
	return m
}

// listable reports whether a tag's key can be a path, as EC2 requires.
func listable(key string) bool {
	return !strings.ContainsFunc(key, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("+-=.,_:@", r))
	})
}

// below returns a listing of a directory: the next segments of all paths below it.
func below(i world.Instance, now world.Moment, dir string) []string {
	paths := []string{}
	for p := range values(i, now) {
		paths = append(paths, p)
	}
	if i.Profile != "" {
		paths = append(paths, "iam/info", "iam/security-credentials/"+i.Profile)
	}
	var out []string
	for _, p := range paths {
		rest, ok := p, true
		if dir != "" {
			rest, ok = strings.CutPrefix(p, dir+"/")
		}
		if !ok || rest == "" {
			continue
		}
		if head, _, deeper := strings.Cut(rest, "/"); deeper {
			rest = head + "/"
		}
		out = append(out, rest)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func identity(i world.Instance) map[string]any {
	return map[string]any{
		"accountId": i.Account, "architecture": "x86_64", "availabilityZone": i.Zone, "imageId": i.Image,
		"instanceId": i.ID, "instanceType": i.Type, "pendingTime": i.Launched.UTC().Format(time.RFC3339),
		"privateIp": i.PrivateIP.String(), "region": i.Region, "version": "2017-09-30",
		"billingProducts": nil, "devpayProductCodes": nil, "kernelId": nil, "ramdiskId": nil, "marketplaceProductCodes": nil,
	}
}

// credentials returns the credentials of the instance profile's role, valid for
// six hours.
func credentials(i world.Instance, now world.Moment, info bool) map[string]any {
	if info {
		return map[string]any{
			"Code": "Success", "LastUpdated": now.Wire.UTC().Format(time.RFC3339),
			"InstanceProfileArn": "arn:aws:iam::" + i.Account + ":instance-profile/" + i.Profile, "InstanceProfileId": "AIPASIM",
		}
	}
	until := now.Wire.Add(6 * time.Hour).Truncate(time.Second)
	return map[string]any{
		"Code": "Success", "LastUpdated": now.Wire.UTC().Format(time.RFC3339), "Type": "AWS-HMAC",
		"AccessKeyId": "ASIASIM" + strconv.FormatInt(until.Unix(), 36), "SecretAccessKey": "simulated",
		"Token": world.SessionToken(world.Principal{
			Account: i.Account, Role: i.Profile, Instance: i.ID, Expires: until,
			ARN: "arn:aws:sts::" + i.Account + ":assumed-role/" + i.Profile + "/" + i.ID,
		}),
		"Expiration": until.UTC().Format(time.RFC3339),
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		plain(w, http.StatusInternalServerError, err.Error())
		return
	}
	plain(w, http.StatusOK, string(b))
}
