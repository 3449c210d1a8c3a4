package cmlsim

import (
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"time"

	"lull/internal/sim/world"
)

// computeRoutes adds the routes about the machines of a CML cluster. The simulated
// cluster has one machine.
func (h *CML) computeRoutes() {
	compute := func(host *world.Host) map[string]any {
		deployed := 0
		for k := range host.Labs {
			if !host.Labs[k].StartedAt.IsZero() {
				deployed += host.Labs[k].Nodes
			}
		}
		return map[string]any{
			"id": host.Licence.Product, "hostname": "cml-controller", "server_address": "localhost", "is_connector": true, "is_simulator": true,
			"is_connected": true, "is_synced": true, "admission_state": "READY",
			"node_counts": map[string]int{"deployed": deployed, "running": host.RunningNodes(), "orphans": 0, "total_deployed_nodes": deployed},
		}
	}
	h.handle("GET system/compute_hosts", false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) { return []any{compute(host)}, nil }))
	one := func(q *request, host *world.Host) error {
		if id := q.r.PathValue("compute"); id != host.Licence.Product {
			return missing("Compute host", id)
		}
		return nil
	}
	h.handle("GET system/compute_hosts/{compute}", false, show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
		return compute(host), one(q, host)
	}))
	state := func(q *request) (string, error) {
		var in struct {
			State string `json:"admission_state"`
		}
		if err := q.strict(&in); err != nil {
			return "", err
		}
		if !slices.Contains([]string{"UNREGISTERED", "REGISTERED", "ONLINE", "READY"}, in.State) {
			return "", failure{http.StatusBadRequest, "admission_state is not known"}
		}
		return in.State, nil
	}
	h.handle("PATCH system/compute_hosts/{compute}", false, admin(func(q *request) error {
		s, err := state(q)
		if err != nil {
			return err
		}
		return show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
			if err := one(q, host); err != nil {
				return nil, err
			}
			if s != "READY" {
				return nil, failure{http.StatusBadRequest, "The controller is always READY"}
			}
			return compute(host), nil
		})(q)
	}))
	h.handle("GET system/compute_hosts/configuration", false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
		return map[string]any{"admission_state": orText(host.Settings.Admission, "READY")}, nil
	}))
	h.handle("PATCH system/compute_hosts/configuration", false, admin(func(q *request) error {
		s, err := state(q)
		if err != nil {
			return err
		}
		return show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
			host.Settings.Admission = s
			return map[string]any{"admission_state": s}, nil
		})(q)
	}))
	h.handle("GET system/external_connectors", false, func(q *request) error {
		return q.ok([]any{map[string]any{"id": "58d92d1e-0000-4000-a000-000000000001", "label": "NAT", "device_name": "virbr0", "protected": true, "tags": []string{"NAT"},
			"operational": map[string]any{"interface": "virbr0"}}})
	})
	h.handle("GET web_session_timeout", false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
		if t := host.Settings.SessionTimeout; t > 0 {
			return t, nil
		}
		return 3600, nil
	}))
	h.handle("PATCH web_session_timeout/{seconds}", false, admin(func(q *request) error {
		n, err := strconv.Atoi(q.r.PathValue("seconds"))
		if err != nil || n <= 0 {
			return failure{http.StatusBadRequest, "the timeout is not a number of seconds"}
		}
		return show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
			host.Settings.SessionTimeout = n
			return "OK", nil
		})(q)
	}))
}

func orText(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// association is a lab that is shared with a user or group.
type association struct {
	ID          string   `json:"id"`
	Permissions []string `json:"permissions"`
}

// associations returns the labs shared with a group or user.
func associations(host *world.Host, id string) []association {
	out := []association{}
	for k := range host.Labs {
		for _, s := range append(slices.Clone(host.Labs[k].Shared.Groups), host.Labs[k].Shared.Users...) {
			if s.ID == id && !host.Labs[k].Removed {
				out = append(out, association{host.Labs[k].ID, s.Permissions})
			}
		}
	}
	return out
}

// associate shares exactly the labs in list with a group or user. It ends all other
// shares.
func associate(host *world.Host, id string, group bool, list []association) error {
	for _, a := range list {
		if host.LabAt(a.ID) == nil || len(a.Permissions) == 0 {
			return failure{http.StatusBadRequest, "associations name no lab, or no permissions"}
		}
	}
	for k := range host.Labs {
		l := &host.Labs[k]
		of := &l.Shared.Users
		if group {
			of = &l.Shared.Groups
		}
		*of = slices.DeleteFunc(slices.Clone(*of), func(s world.Share) bool { return s.ID == id })
		if i := slices.IndexFunc(list, func(a association) bool { return a.ID == l.ID }); i >= 0 {
			*of = append(*of, world.Share{ID: id, Permissions: list[i].Permissions})
		}
	}
	return nil
}

func userView(host *world.Host, a world.Account) map[string]any {
	groups, labs := []string{}, []string{}
	for _, g := range host.Groups {
		if slices.Contains(g.Members, a.ID) {
			groups = append(groups, g.ID)
		}
	}
	for k := range host.Labs {
		if host.Labs[k].Owner == a.ID && !host.Labs[k].Removed {
			labs = append(labs, host.Labs[k].ID)
		}
	}
	return map[string]any{
		"id": a.ID, "username": a.Name, "fullname": a.Fullname, "description": a.Description, "email": a.Email, "admin": a.Admin,
		"groups": groups, "labs": labs, "associations": associations(host, a.ID), "opt_in": a.OptIn, "resource_pool": a.ResourcePool,
		"pubkey_info": a.Pubkey, "tour_version": a.TourVersion, "directory_dn": "",
		"created": wireTime(host, a.Created), "modified": wireTime(host, a.Modified),
	}
}

func wireTime(host *world.Host, t time.Time) string {
	return t.Add(host.Offset).UTC().Format(time.RFC3339)
}

func groupView(host *world.Host, g world.Group) map[string]any {
	labs := []any{}
	for _, a := range associations(host, g.ID) {
		labs = append(labs, map[string]any{"id": a.ID, "permission": "read_only"})
	}
	return map[string]any{
		"id": g.ID, "name": g.Name, "description": g.Description, "members": append([]string{}, g.Members...), "labs": labs,
		"associations": associations(host, g.ID), "directory_dn": "", "created": wireTime(host, g.Created), "modified": wireTime(host, g.Modified),
	}
}

// userInput is a client's description of a user. A nil field is unchanged.
type userInput struct {
	Username     *string         `json:"username"`
	Password     json.RawMessage `json:"password"` // a string, or {old_password, new_password}
	Fullname     *string         `json:"fullname"`
	Description  *string         `json:"description"`
	Email        *string         `json:"email"`
	Admin        *bool           `json:"admin"`
	Groups       *[]string       `json:"groups"`
	Associations *[]association  `json:"associations"`
	ResourcePool *string         `json:"resource_pool"`
	OptIn        *bool           `json:"opt_in"`
	TourVersion  *string         `json:"tour_version"`
	Pubkey       *string         `json:"pubkey"`
}

// weakPasswords are the passwords that the simulator rejects; CML rejects many more.
var weakPasswords = []string{"password", "admin", "cisco"}

func weak(password string) error {
	if slices.Contains(weakPasswords, password) {
		return failure{http.StatusForbidden, "password in common word list"}
	}
	if password == "" {
		return failure{http.StatusBadRequest, "password is empty"}
	}
	return nil
}

// apply changes an account and its groups. It changes nothing if it fails.
func (in userInput) apply(host *world.Host, now world.Moment, a *world.Account) error {
	if in.Groups != nil {
		for _, id := range *in.Groups {
			if host.GroupAt(id) == nil {
				return failure{http.StatusBadRequest, "group does not exist: " + id}
			}
		}
	}
	if in.Associations != nil {
		if err := associate(host, a.ID, false, *in.Associations); err != nil {
			return err
		}
	}
	for from, to := range map[*string]*string{in.Fullname: &a.Fullname, in.Description: &a.Description, in.Email: &a.Email, in.TourVersion: &a.TourVersion, in.Pubkey: &a.Pubkey} {
		if from != nil {
			*to = *from
		}
	}
	if in.ResourcePool != nil {
		a.ResourcePool = in.ResourcePool
	}
	if in.OptIn != nil {
		a.OptIn = in.OptIn
	}
	if in.Admin != nil && *in.Admin != a.Admin {
		a.Admin = *in.Admin
		host.EndSessions(a.ID)
	}
	if in.Groups != nil {
		for k := range host.Groups {
			g := &host.Groups[k]
			g.Members = slices.DeleteFunc(slices.Clone(g.Members), func(id string) bool { return id == a.ID })
			if slices.Contains(*in.Groups, g.ID) {
				g.Members = append(g.Members, a.ID)
			}
		}
	}
	a.Modified = now.Wire
	return nil
}

var userName = regexp.MustCompile(`^[^\s/]{1,32}$`)

const maxPeople = 1000 // maximum users or groups of a host

func (h *CML) peopleRoutes() {
	h.handle("GET users", false, show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		out := []any{}
		for _, a := range host.AllAccounts(now) {
			out = append(out, userView(host, a))
		}
		return out, nil
	}))
	h.handle("POST users", false, admin((*request).createUser))
	user := func(q *request, host *world.Host, now world.Moment) (*world.Account, error) {
		host.AllAccounts(now)
		if a := host.Account(q.r.PathValue("user")); a != nil {
			return a, nil
		}
		return nil, failure{http.StatusNotFound, "User does not exist: " + q.r.PathValue("user")}
	}
	h.handle("GET users/{user}", false, show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		a, err := user(q, host, now)
		if err != nil {
			return nil, err
		}
		return userView(host, *a), nil
	}))
	h.handle("PATCH users/{user}", false, func(q *request) error {
		var in userInput
		if err := q.strict(&in); err != nil {
			return err
		}
		return show(func(q *request, host *world.Host, now world.Moment) (any, error) {
			a, err := user(q, host, now)
			switch {
			case err != nil:
				return nil, err
			case !q.admin && (a.ID != q.user || in.Admin != nil || in.Groups != nil):
				return nil, failure{http.StatusForbidden, "The user is not an administrator"}
			case a.ID == q.user && in.Admin != nil && !*in.Admin:
				return nil, failure{http.StatusBadRequest, "Users cannot give up their own rights"}
			case in.Username != nil && *in.Username != a.Name:
				return nil, failure{http.StatusBadRequest, "username cannot be changed"}
			}
			if err := in.changePassword(host, a, q.admin); err != nil {
				return nil, err
			}
			if err := in.apply(host, now, a); err != nil {
				return nil, err
			}
			return userView(host, *a), nil
		})(q)
	})
	h.handle("DELETE users/{user}", false, admin(change(func(q *request, host *world.Host, now world.Moment) error {
		a, err := user(q, host, now)
		if err != nil {
			return err
		}
		if a.ID == q.user || a.ID == world.AdminID {
			return failure{http.StatusBadRequest, "The user cannot be deleted"}
		}
		id := a.ID
		if err := associate(host, id, false, nil); err != nil {
			return err
		}
		for k := range host.Groups {
			host.Groups[k].Members = slices.DeleteFunc(host.Groups[k].Members, func(m string) bool { return m == id })
		}
		host.Accounts = slices.DeleteFunc(host.Accounts, func(a world.Account) bool { return a.ID == id })
		return nil
	})))
	h.handle("GET users/{name}/id", false, show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		for _, a := range host.AllAccounts(now) {
			if a.Name == q.r.PathValue("name") {
				return a.ID, nil
			}
		}
		return nil, failure{http.StatusNotFound, "User does not exist: " + q.r.PathValue("name")}
	}))
	h.groupRoutes()
}

func (in userInput) changePassword(host *world.Host, a *world.Account, admin bool) error {
	if in.Password == nil {
		return nil
	}
	var p struct {
		Old string `json:"old_password"`
		New string `json:"new_password"`
	}
	if err := json.Unmarshal(in.Password, &p); err != nil {
		return failure{http.StatusBadRequest, "password is not {old_password, new_password}"}
	}
	if err := weak(p.New); err != nil {
		return err
	}
	if p.Old != orText(a.Password, host.Password) && !admin {
		return failure{http.StatusForbidden, "old_password is wrong"}
	}
	a.Password = p.New
	host.EndSessions(a.ID)
	return nil
}

func (q *request) createUser() error {
	var in userInput
	if err := q.strict(&in); err != nil {
		return err
	}
	var password string
	if in.Username == nil || !userName.MatchString(*in.Username) || json.Unmarshal(in.Password, &password) != nil {
		return failure{http.StatusBadRequest, "username or password is missing or not a string"}
	}
	if err := weak(password); err != nil {
		return err
	}
	return show(func(q *request, host *world.Host, now world.Moment) (any, error) {
		if slices.ContainsFunc(host.AllAccounts(now), func(a world.Account) bool { return a.Name == *in.Username }) {
			return nil, failure{http.StatusUnprocessableEntity, "User already exists: " + *in.Username}
		}
		if len(host.Accounts) >= maxPeople {
			return nil, failure{http.StatusBadRequest, "the host has too many users"}
		}
		a := world.Account{ID: host.NewID(), Name: *in.Username, Password: password, Created: now.Wire}
		if err := in.apply(host, now, &a); err != nil {
			return nil, err
		}
		host.Accounts = append(host.Accounts, a)
		return userView(host, a), nil
	})(q)
}

// groupInput is a client's description of a group. A nil field is unchanged.
type groupInput struct {
	Name         *string        `json:"name"`
	Description  *string        `json:"description"`
	Members      *[]string      `json:"members"`
	Associations *[]association `json:"associations"`
}

func (in groupInput) apply(host *world.Host, now world.Moment, g *world.Group) error {
	if in.Name != nil {
		if *in.Name == "" || len(*in.Name) > 64 {
			return failure{http.StatusBadRequest, "name is not 1 to 64 characters"}
		}
		if slices.ContainsFunc(host.Groups, func(o world.Group) bool { return o.Name == *in.Name && o.ID != g.ID }) {
			return failure{http.StatusUnprocessableEntity, "Group already exists: " + *in.Name}
		}
	}
	if in.Members != nil {
		host.AllAccounts(now)
		for _, id := range *in.Members {
			if host.Account(id) == nil {
				return failure{http.StatusBadRequest, "user does not exist: " + id}
			}
		}
	}
	if in.Associations != nil {
		if err := associate(host, g.ID, true, *in.Associations); err != nil {
			return err
		}
	}
	if in.Name != nil {
		g.Name = *in.Name
	}
	if in.Description != nil {
		g.Description = *in.Description
	}
	if in.Members != nil {
		g.Members = *in.Members
	}
	g.Modified = now.Wire
	return nil
}

func (h *CML) groupRoutes() {
	group := func(q *request, host *world.Host) (*world.Group, error) {
		if g := host.GroupAt(q.r.PathValue("group")); g != nil {
			return g, nil
		}
		return nil, failure{http.StatusNotFound, "Group does not exist: " + q.r.PathValue("group")}
	}
	h.handle("GET groups", false, show(func(_ *request, host *world.Host, _ world.Moment) (any, error) {
		out := []any{}
		for _, g := range host.Groups {
			out = append(out, groupView(host, g))
		}
		return out, nil
	}))
	h.handle("POST groups", false, admin(func(q *request) error {
		var in groupInput
		if err := q.strict(&in); err != nil {
			return err
		}
		return show(func(_ *request, host *world.Host, now world.Moment) (any, error) {
			if in.Name == nil || len(host.Groups) >= maxPeople {
				return nil, failure{http.StatusBadRequest, "name is missing, or the host has too many groups"}
			}
			g := world.Group{ID: host.NewID(), Created: now.Wire}
			if err := in.apply(host, now, &g); err != nil {
				return nil, err
			}
			host.Groups = append(host.Groups, g)
			return groupView(host, g), nil
		})(q)
	}))
	h.handle("GET groups/{group}", false, show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
		g, err := group(q, host)
		if err != nil {
			return nil, err
		}
		return groupView(host, *g), nil
	}))
	h.handle("PATCH groups/{group}", false, admin(func(q *request) error {
		var in groupInput
		if err := q.strict(&in); err != nil {
			return err
		}
		return show(func(q *request, host *world.Host, now world.Moment) (any, error) {
			g, err := group(q, host)
			if err != nil {
				return nil, err
			}
			if err := in.apply(host, now, g); err != nil {
				return nil, err
			}
			return groupView(host, *g), nil
		})(q)
	}))
	h.handle("DELETE groups/{group}", false, admin(change(func(q *request, host *world.Host, _ world.Moment) error {
		g, err := group(q, host)
		if err != nil {
			return err
		}
		id := g.ID
		if err := associate(host, id, true, nil); err != nil {
			return err
		}
		host.Groups = slices.DeleteFunc(host.Groups, func(g world.Group) bool { return g.ID == id })
		return nil
	})))
	h.handle("GET groups/{name}/id", false, show(func(q *request, host *world.Host, _ world.Moment) (any, error) {
		for _, g := range host.Groups {
			if g.Name == q.r.PathValue("name") {
				return g.ID, nil
			}
		}
		return nil, failure{http.StatusNotFound, "Group does not exist: " + q.r.PathValue("name")}
	}))
}
