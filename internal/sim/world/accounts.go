package world

import (
	"encoding/json"
	"slices"
	"time"
)

// Account is a user of CML. An empty Password means the host's.
type Account struct {
	ID, Name, Password           string
	Fullname, Description, Email string
	Admin                        bool
	OptIn                        *bool
	Pubkey, TourVersion          string
	ResourcePool                 *string
	Created, Modified            time.Time // client's time
}

// Group is a group of CML's users.
type Group struct {
	ID, Name, Description string
	Members               []string
	Created, Modified     time.Time // client's time
}

// Settings are what administrators have changed on a CML host. The zero value is a
// new host.
type Settings struct {
	SessionTimeout int                        `json:",omitempty"` // seconds; 0 means 3600
	Admission      string                     `json:",omitempty"` // default for new compute hosts; empty means READY
	NodeDefs       map[string]json.RawMessage `json:",omitempty"`
	ImageDefs      map[string]json.RawMessage `json:",omitempty"`
	DropFolder     []string                   `json:",omitempty"`
	ReadOnly       map[string]bool            `json:",omitempty"` // by "node" or "image" and id
}

// AllAccounts returns the accounts of a host: the built-in one, those of scripted
// users, and those that were created or have logged in.
func (h *Host) AllAccounts(now Moment) []Account {
	h.account(now, "admin")
	for _, u := range h.Users {
		h.account(now, u.Name)
	}
	return h.Accounts
}

// account returns the account called name. If the host has not seen it, it is created
// as an administrator with the host's password.
func (h *Host) account(now Moment, name string) *Account {
	k := slices.IndexFunc(h.Accounts, func(a Account) bool { return a.Name == name })
	if k < 0 {
		k = len(h.Accounts)
		h.Accounts = append(h.Accounts, Account{ID: h.UserID(name), Name: name, Admin: true, Created: now.Wire, Modified: now.Wire})
	}
	return &h.Accounts[k]
}

// Login returns the account with this name and password, or nil.
func (h *Host) Login(now Moment, name, password string) *Account {
	want := h.Password
	if k := slices.IndexFunc(h.Accounts, func(a Account) bool { return a.Name == name }); k >= 0 && h.Accounts[k].Password != "" {
		want = h.Accounts[k].Password
	}
	if name == "" || password != want {
		return nil
	}
	return h.account(now, name)
}

// Account returns the account with an id, nil if there is none.
func (h *Host) Account(id string) *Account {
	if k := slices.IndexFunc(h.Accounts, func(a Account) bool { return a.ID == id }); k >= 0 {
		return &h.Accounts[k]
	}
	return nil
}

// EndSessions revokes all tokens of a user.
func (h *Host) EndSessions(id string) {
	if h.Epochs == nil {
		h.Epochs = map[string]int{}
	}
	h.Epochs[id]++
}

// GroupAt returns the group with an id, nil if there is none.
func (h *Host) GroupAt(id string) *Group {
	if k := slices.IndexFunc(h.Groups, func(g Group) bool { return g.ID == id }); k >= 0 {
		return &h.Groups[k]
	}
	return nil
}
