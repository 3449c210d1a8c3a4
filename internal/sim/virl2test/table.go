// Package virl2test is a client of CML that sends what Cisco's client library
// sends, in the same order, and accepts responses only in the shapes that the
// library reads. It shares no code with lull's own client or with the
// simulator, so that the simulator is checked against an independent use of
// CML. It is for tests.
//
// Requests describes every request as data, so that it can be compared with the
// library: the paths are the URL templates of its models, the fields are the
// members of the bodies that its methods send, and an answer lists the members
// that its methods read.
package virl2test

// Version is the library (virl2_client of CiscoDevNet) that Requests was
// compared with: its models as of 2.9, its client as of 2.11.
const Version = "virl2_client 2.9.0 to 2.11.0"

// Kinds of values in an answer. A string ending in "?" may be null.
const (
	text   = "string"
	number = "number"
	truth  = "bool"
	object = "object"
	list   = "list"
	yaml   = "text"  // not JSON
	none   = "empty" // the library does not read the body
)

// Request is one request of the library.
type Request struct {
	Method string
	Path   string // below /api/v0/, with the template's names in braces
	Fields string // members that the body may have, separated by spaces; "-" means a plain value
	Answer any    // kind, or map of member to kind, or list with the kind of its elements
}

// members lists the members of an object that the library reads.
type members = map[string]any

// elements is a list whose elements have the given kind.
type elements []any

var (
	labShape = members{"id": text, "lab_title": text, "lab_description": text, "lab_notes": text, "state": text, "created": text,
		"node_count": number, "link_count": number, "groups": list}
	nodeShape = members{"id": text, "label": text, "node_definition": text, "x": number, "y": number, "tags": list, "state": text,
		"interfaces": elements{members{"id": text, "label": text, "type": text, "slot": number}}}
	topologyShape = members{"lab": members{"title": text, "description": text, "notes": text, "owner": text},
		"nodes": elements{nodeShape}, "links": elements{members{"id": text, "interface_a": text, "interface_b": text, "label": text}},
		"annotations": list, "smart_annotations": list}
	userShape    = members{"id": text, "username": text, "fullname": text, "description": text, "admin": truth, "groups": list, "associations": list}
	groupShape   = members{"id": text, "name": text, "description": text, "members": list, "associations": list}
	computeShape = members{"id": text, "hostname": text, "server_address": text, "is_connector": truth, "is_simulator": truth,
		"is_connected": truth, "is_synced": truth, "admission_state": text, "node_counts": object}
	noticeShape = members{"id": text, "level": text, "label": text, "content": text, "enabled": truth, "acknowledged": object, "groups": "list?"}
	timeShape   = members{"failure": "string?", "success": "string?"}
	licensing   = members{
		"registration":    members{"status": text, "expires": "string?", "register_time": timeShape, "renew_time": timeShape},
		"authorization":   members{"status": text, "expires": "string?", "renew_time": timeShape},
		"product_license": members{"active": text}, "reservation_mode": truth,
		"transport": members{"ssms": text, "default_ssms": text, "proxy": members{"server": "string?", "port": "number?"}}}
)

const (
	userFields = "fullname description email admin groups associations resource_pool opt_in tour_version pubkey"
	nodeFields = "label node_definition x y image_definition configuration ram cpus cpu_limit data_volume boot_disk_size hide_links tags parameters pinned_compute_id"
)

// Requests are the requests of the library, under names of this package.
var Requests = map[string]Request{
	// the client
	"authenticate":       {"POST", "authenticate", "username password", text},
	"authok":             {"GET", "authok", "", text},
	"authentication":     {"GET", "authentication", "", members{"id": text, "username": text, "admin": truth}},
	"logout":             {"DELETE", "logout", "", truth},
	"system_information": {"GET", "system_information", "", members{"version": text, "ready": truth}},
	"system_health":      {"GET", "system_health", "", members{"valid": truth, "computes": object, "controller": object}},
	"system_stats":       {"GET", "system_stats", "", members{"computes": object, "all": object, "controller": object}},
	"labs":               {"GET", "labs", "", elements{text}},
	"create lab":         {"POST", "labs", "title description notes autostart node_staging", labShape},
	"import":             {"POST", "import", "-", members{"id": text}},
	"sample labs":        {"GET", "sample/labs", "", object},
	"import sample lab":  {"PUT", "sample/labs/{sample_lab_id}", "", text},
	"lab tiles":          {"GET", "populate_lab_tiles", "", members{"lab_tiles": object}},
	"resource pools":     {"GET", "resource_pools", "", list},

	// a lab
	"lab":                 {"GET", "labs/{lab_id}", "", labShape},
	"change lab":          {"PATCH", "labs/{lab_id}", "title description notes owner", none},
	"remove lab":          {"DELETE", "labs/{lab_id}", "", none},
	"topology":            {"GET", "labs/{lab_id}/topology", "", topologyShape},
	"download":            {"GET", "labs/{lab_id}/download", "", yaml},
	"start lab":           {"PUT", "labs/{lab_id}/start", "", none},
	"stop lab":            {"PUT", "labs/{lab_id}/stop", "", none},
	"wipe lab":            {"PUT", "labs/{lab_id}/wipe", "", none},
	"lab state":           {"GET", "labs/{lab_id}/state", "", text},
	"lab converged":       {"GET", "labs/{lab_id}/check_if_converged", "", truth},
	"element states":      {"GET", "labs/{lab_id}/lab_element_state", "", members{"nodes": object, "links": object, "interfaces": object}},
	"statistics":          {"GET", "labs/{lab_id}/simulation_stats", "", members{"nodes": object, "links": object}},
	"lab addresses":       {"GET", "labs/{lab_id}/layer3_addresses", "", object},
	"lab events":          {"GET", "labs/{lab_id}/events", "", list},
	"lab associations":    {"GET", "labs/{lab_id}/associations", "", members{"groups": list, "users": list}},
	"share lab":           {"PATCH", "labs/{lab_id}/associations", "groups users", members{"groups": list, "users": list}},
	"connector mappings":  {"GET", "labs/{lab_id}/connector_mappings", "", list},
	"lab resource pools":  {"GET", "labs/{lab_id}/resource_pools", "", list},
	"build configuration": {"GET", "labs/{lab_id}/bootstrap", "", none},

	// nodes
	"nodes":                 {"GET", "labs/{lab_id}/nodes", "", elements{members{"id": text, "operational": members{"compute_id": "string?", "resource_pool": "string?"}}}},
	"create node":           {"POST", "labs/{lab_id}/nodes", nodeFields, members{"id": text}},
	"node":                  {"GET", "labs/{lab_id}/nodes/{id}", "", members{"operational": object}},
	"change node":           {"PATCH", "labs/{lab_id}/nodes/{id}", nodeFields, none},
	"remove node":           {"DELETE", "labs/{lab_id}/nodes/{id}", "", none},
	"node state":            {"GET", "labs/{lab_id}/nodes/{id}/state", "", members{"state": text}},
	"node converged":        {"GET", "labs/{lab_id}/nodes/{id}/check_if_converged", "", truth},
	"start node":            {"PUT", "labs/{lab_id}/nodes/{id}/state/start", "", none},
	"stop node":             {"PUT", "labs/{lab_id}/nodes/{id}/state/stop", "", none},
	"wipe node":             {"PUT", "labs/{lab_id}/nodes/{id}/wipe_disks", "", none},
	"extract configuration": {"PUT", "labs/{lab_id}/nodes/{id}/extract_configuration", "", none},
	"node addresses":        {"GET", "labs/{lab_id}/nodes/{id}/layer3_addresses", "", members{"interfaces": object}},
	"node interfaces":       {"GET", "labs/{lab_id}/nodes/{id}/interfaces", "", elements{members{"id": text, "state": text}}},

	// interfaces and links
	"create interface":  {"POST", "labs/{lab_id}/interfaces", "node slot", members{"id": text, "label": text, "slot": number}},
	"create interfaces": {"POST", "labs/{lab_id}/interfaces", "node slot", elements{members{"id": text, "label": text, "slot": number}}},
	"change interface":  {"PATCH", "labs/{lab_id}/interfaces/{id}", "mac_address", none},
	"remove interface":  {"DELETE", "labs/{lab_id}/interfaces/{id}", "", none},
	"interface state":   {"GET", "labs/{lab_id}/interfaces/{id}/state", "", members{"state": text}},
	"start interface":   {"PUT", "labs/{lab_id}/interfaces/{id}/state/start", "", none},
	"stop interface":    {"PUT", "labs/{lab_id}/interfaces/{id}/state/stop", "", none},
	"create link":       {"POST", "labs/{lab_id}/links", "src_int dst_int", members{"id": text, "label": text}},
	"link":              {"GET", "labs/{lab_id}/links/{id}", "", members{"state": text}},
	"remove link":       {"DELETE", "labs/{lab_id}/links/{id}", "", none},
	"link converged":    {"GET", "labs/{lab_id}/links/{id}/check_if_converged", "", truth},
	"start link":        {"PUT", "labs/{lab_id}/links/{id}/state/start", "", none},
	"stop link":         {"PUT", "labs/{lab_id}/links/{id}/state/stop", "", none},
	"condition":         {"GET", "labs/{lab_id}/links/{id}/condition", "", object},
	"set condition":     {"PATCH", "labs/{lab_id}/links/{id}/condition", "bandwidth latency jitter loss", none},
	"remove condition":  {"DELETE", "labs/{lab_id}/links/{id}/condition", "", none},

	// users and groups
	"users":        {"GET", "users", "", elements{userShape}},
	"user":         {"GET", "users/{user_id}", "", userShape},
	"create user":  {"POST", "users", "username password " + userFields, userShape},
	"change user":  {"PATCH", "users/{user_id}", "password " + userFields, userShape},
	"delete user":  {"DELETE", "users/{user_id}", "", none},
	"user id":      {"GET", "users/{username}/id", "", text},
	"groups":       {"GET", "groups", "", elements{groupShape}},
	"group":        {"GET", "groups/{group_id}", "", groupShape},
	"create group": {"POST", "groups", "name description members associations", groupShape},
	"change group": {"PATCH", "groups/{group_id}", "name description members associations", groupShape},
	"delete group": {"DELETE", "groups/{group_id}", "", none},
	"group id":     {"GET", "groups/{group_name}/id", "", text},

	// definitions
	"node definitions":          {"GET", "node_definitions", "", elements{members{"id": text}}},
	"node definition":           {"GET", "node_definitions/{definition_id}", "", yaml},
	"upload node definition":    {"POST", "node_definitions", "-", text},
	"update node definition":    {"PUT", "node_definitions", "-", text},
	"remove node definition":    {"DELETE", "node_definitions/{definition_id}", "", none},
	"node definition lock":      {"PUT", "node_definitions/{definition_id}/read_only", "-", object},
	"images of node definition": {"GET", "node_definitions/{definition_id}/image_definitions", "", elements{members{"id": text}}},
	"image definitions":         {"GET", "image_definitions", "", elements{members{"id": text, "node_definition_id": text}}},
	"image definition":          {"GET", "image_definitions/{definition_id}", "", yaml},
	"upload image definition":   {"POST", "image_definitions", "-", text},
	"remove image definition":   {"DELETE", "image_definitions/{definition_id}", "", none},
	"image definition lock":     {"PUT", "image_definitions/{definition_id}/read_only", "-", object},
	"upload image":              {"POST", "images/upload", "-", none},
	"image files":               {"GET", "list_image_definition_drop_folder", "", list},
	"remove image file":         {"DELETE", "images/manage/{filename}", "", text},

	// the system
	"compute hosts":       {"GET", "system/compute_hosts", "", elements{computeShape}},
	"change compute host": {"PATCH", "system/compute_hosts/{compute_id}", "admission_state", computeShape},
	"new compute hosts":   {"GET", "system/compute_hosts/configuration", "", members{"admission_state": text}},
	"admit compute hosts": {"PATCH", "system/compute_hosts/configuration", "admission_state", members{"admission_state": text}},
	"notices":             {"GET", "system/notices", "", elements{noticeShape}},
	"change notice":       {"PATCH", "system/notices/{notice_id}", "level label content enabled groups", noticeShape},
	"remove notice":       {"DELETE", "system/notices/{notice_id}", "", none},
	"maintenance":         {"GET", "system/maintenance_mode", "", members{"maintenance_mode": truth, "notice": "string?"}},
	"set maintenance":     {"PATCH", "system/maintenance_mode", "maintenance_mode notice", members{"resolved_notice": "object?"}},
	"external connectors": {"GET", "system/external_connectors", "", elements{members{"device_name": text, "label": text}}},
	"session timeout":     {"GET", "web_session_timeout", "", number},
	"set session timeout": {"PATCH", "web_session_timeout/{timeout}", "", text},

	// licensing
	"licensing":             {"GET", "licensing", "", licensing},
	"tech support":          {"GET", "licensing/tech_support", "", yaml},
	"renew authorization":   {"PUT", "licensing/authorization/renew", "", none},
	"set transport":         {"PUT", "licensing/transport", "ssms proxy", none},
	"set product license":   {"PUT", "licensing/product_license", "-", none},
	"register":              {"POST", "licensing/registration", "token reregister", none},
	"renew registration":    {"PUT", "licensing/registration/renew", "", none},
	"deregister":            {"DELETE", "licensing/deregistration", "", none},
	"features":              {"GET", "licensing/features", "", elements{members{"id": text, "in_use": number, "min": number, "max": number}}},
	"update features":       {"PATCH", "licensing/features", "-", none},
	"reservation mode":      {"PUT", "licensing/reservation/mode", "-", none},
	"request a reservation": {"POST", "licensing/reservation/request", "", text},
	"cancel a reservation":  {"DELETE", "licensing/reservation/cancel", "", none},
}
